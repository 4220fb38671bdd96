#!/bin/sh
# Proves that what users get works: sdist -> wheel from that sdist -> fresh environment -> import everything, run the
# command. A wheel made straight from the checkout would hide an incomplete sdist, so the sdist is unpacked elsewhere
# and the wheel is built there.
set -eu

cd "$(dirname "$0")/.."
checkout=$PWD
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

echo "smoke: building the sdist, and the wheel from it"
.venv/bin/python -m build --sdist --outdir "$work/dist" . >"$work/build.log" 2>&1 || { cat "$work/build.log"; exit 1; }
mkdir "$work/unpacked"
tar -xzf "$work"/dist/kvferry-*.tar.gz -C "$work/unpacked"
.venv/bin/python -m build --wheel --outdir "$work/dist" "$work"/unpacked/kvferry-* >"$work/build.log" 2>&1 ||
    { cat "$work/build.log"; exit 1; }
.venv/bin/python .ci/check_wheel.py "$work"/dist/kvferry-*.whl "$checkout"

echo "smoke: installing the wheel into a fresh environment"
cd "$work" # away from the checkout, whose folders would be importable
"$checkout/.venv/bin/python" -m venv fresh
fresh/bin/python -m pip install --quiet --disable-pip-version-check "$(ls dist/kvferry-*.whl)[models]"
fresh/bin/python -I "$checkout/.ci/import_all.py"
fresh/bin/kvferry --help >/dev/null

echo "smoke: the same without MLX, as on a machine that has no back end for it"
fresh/bin/python -m pip uninstall --quiet --yes mlx mlx-lm mlx-cpu mlx-metal transformers gguf 2>/dev/null
fresh/bin/python -I -c 'from kvferry.client import Client'
fresh/bin/kvferry --help >/dev/null
echo "smoke: fine"
