"""Files in and out of containers as tar streams, which is what `cp` of both engines reads and writes."""

from __future__ import annotations

import asyncio
import io
import tarfile

from megatron_t1.environment.task import Files

HEADER_BYTES = 1 << 16  # a tar header with its extensions
DIRECTORY, LINK, OTHER = "is a directory", "is a symbolic link", "is not a regular file"


def pack(files: Files) -> bytes:
    """A tar of regular files owned by root; names are taken relative to where it is unpacked."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, (content, mode) in files.items():
            member = tarfile.TarInfo(name.lstrip("/"))
            member.size, member.mode = len(content), mode
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def open_directory(mode: int) -> bytes:
    """A tar that only sets the permission bits of the directory it is unpacked in."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        member = tarfile.TarInfo(".")
        member.type, member.mode = tarfile.DIRTYPE, mode
        archive.addfile(member)
    return buffer.getvalue()


def regular_files(data: bytes, names: tuple[str, ...], limit: int) -> tuple[dict[str, bytes], dict[str, str]]:
    """Contents of the files `names` that lie directly in the archived directory, and why others were not read.

    Raises:
        ValueError: this is no tar, or it was cut off.
    """
    files, problems = {}, {}
    try:
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            for member in archive:
                _, _, name = member.name.rstrip("/").rpartition("/")
                depth = member.name.lstrip("./").count("/")
                if name not in names or depth > 1:
                    continue
                if member.isreg() and member.size <= limit:
                    files[name] = archive.extractfile(member).read()
                else:
                    problems[name] = f"is larger than {limit} bytes" if member.isreg() else kind_of(member)
    except (tarfile.TarError, EOFError) as error:
        raise ValueError(f"its archive can't be read: {error}") from error
    return files, problems


async def first_member(stream: asyncio.StreamReader, limit: int) -> tuple[tarfile.TarInfo, bytes]:
    """The first entry of a tar stream, and its content where it is a regular file of at most `limit` bytes.

    Raises:
        ValueError: the stream holds no entry.
    """
    data = bytearray()
    while len(data) < limit + HEADER_BYTES and (block := await stream.read(HEADER_BYTES)):
        data += block
    try:
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            member = archive.next()
            if member is None:
                raise ValueError("is missing")
            whole = member.isreg() and member.size <= limit
            return member, archive.extractfile(member).read() if whole else b""
    except (tarfile.TarError, EOFError) as error:
        raise ValueError("is missing") from error


def kind_of(member: tarfile.TarInfo) -> str:
    return DIRECTORY if member.isdir() else LINK if member.issym() else OTHER
