"""What of an exception a user gets to read."""

import errno
import sys

import pytest

from megatron_t1 import atomic
from megatron_t1.errors import T1Error, naming, readable


def test_an_operating_system_error_says_path_reason_and_remedy():
    said = str(readable(OSError(errno.ENOSPC, "No space left on device", "/data/x")))
    assert "No space left on device (ENOSPC)" in said and "/data/x" in said and "free some space" in said


def test_a_task_group_is_its_first_readable_error():
    own, full = T1Error("one"), OSError(errno.ENOSPC, "full")
    assert readable(ExceptionGroup("", [ExceptionGroup("", [own]), full])) is own
    assert "full" in str(readable(ExceptionGroup("", [full])))
    assert readable(ExceptionGroup("", [own, ValueError()])) is None  # a defect must not hide behind it
    assert readable(ValueError()) is None


@pytest.mark.parametrize("module, extra", [("torch", "train"), ("megatron.core.ssm", "train"), ("vllm", "rollout")])
def test_a_package_that_only_other_environments_have_is_named(module, extra):
    said = readable(ModuleNotFoundError(f"No module named {module!r}", name=module))
    assert module in said.problem and sys.executable == said.where and f"megatron-t1[{extra}]" in said.remedy
    for own in ("megatron_t1.nowhere", "torchvision", None):  # a defect, or nothing that is asked for
        assert readable(ModuleNotFoundError("No module", name=own)) is None


def test_writing_names_the_file_where_the_system_does_not(tmp_path):
    with pytest.raises(OSError) as caught, atomic.replacing(tmp_path / "file"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert caught.value.filename == str(tmp_path / "file")
    with pytest.raises(OSError) as caught, naming(tmp_path):
        raise OSError(errno.ENOSPC, "No space left on device", "nearer")
    assert caught.value.filename == "nearer"
