#!/usr/bin/env bash
# The vocabulary of gpt-oss (o200k_base.tiktoken) from the npm package js-tiktoken, for $TIKTOKEN_ENCODINGS_BASE.
#   scripts/harmony_vocabulary.sh DIR            needs npm and node; a file that is there and whole is kept
set -euo pipefail
OUT=${1:?the folder for o200k_base.tiktoken}
PACKAGE=js-tiktoken@1.0.21
SHA256=446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d
whole() { echo "$SHA256  $1" | sha256sum --check --status 2>/dev/null; }

mkdir -p "$OUT"
if whole "$OUT/o200k_base.tiktoken"; then exit 0; fi
SCRATCH=$(mktemp -d)
trap 'rm -rf "$SCRATCH"' EXIT
(cd "$SCRATCH" && npm pack --silent "$PACKAGE" >/dev/null && tar xzf js-tiktoken-*.tgz)
# Each line of bpe_ranks: a sign, the first rank, and the pieces from that rank on in base64.
cat > "$SCRATCH/convert.cjs" <<'EOF'
const ranks = require("./package/dist/ranks/o200k_base.cjs");
const pieces = [];
for (const line of (ranks.default ?? ranks).bpe_ranks.split("\n").filter(Boolean)) {
  const [, first, ...found] = line.split(" ");
  found.forEach((piece, index) => pieces.push([Number(first) + index, piece]));
}
pieces.sort((one, other) => one[0] - other[0]);
process.stdout.write(pieces.map(([rank, piece]) => `${piece} ${rank}\n`).join(""));
EOF
node "$SCRATCH/convert.cjs" > "$SCRATCH/o200k_base.tiktoken"
whole "$SCRATCH/o200k_base.tiktoken" || { echo "the vocabulary in $PACKAGE is another one" >&2; exit 1; }
mv "$SCRATCH/o200k_base.tiktoken" "$OUT/o200k_base.tiktoken"
