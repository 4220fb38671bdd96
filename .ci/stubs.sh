#!/bin/sh
# Generates the gRPC stubs of proto/v1/*.proto.
#
#     sh .ci/stubs.sh write    into proto/v1, replacing what is there
#     sh .ci/stubs.sh check    into a temporary folder; fails if the committed ones differ
#
# Works through the links in .dev, so that a file's path is its package and no import needs patching.
set -eu

cd "$(dirname "$0")/.."
PATH=$PWD/.venv/bin:$PATH # protoc finds the mypy_grpc plug-in there
stubs=proto/v1

# Generates into the view "$1", a folder that has kvferry/proto/v1 in it.
generate() {
    python -m grpc_tools.protoc -I .dev --python_out="$1" --pyi_out="$1" --grpc_python_out="$1" \
        --mypy_grpc_out=quiet:"$1" .dev/kvferry/proto/v1/*.proto
    # A file without a service gets gRPC stubs all the same, with nothing in them.
    for proto in "$stubs"/*.proto; do
        grep -q '^service ' "$proto" || rm -f "$1/kvferry/${proto%.proto}"_pb2_grpc.py*
    done
}

case ${1:-} in
    write)
        rm -f "$stubs"/*_pb2*.py "$stubs"/*_pb2*.pyi
        generate .dev
        ;;
    check)
        fresh=$(mktemp -d)
        trap 'rm -rf "$fresh"' EXIT
        mkdir -p "$fresh/kvferry/$stubs"
        generate "$fresh"
        diff -r -u -x '*.proto' -x '__pycache__' -x '__init__.py' -x 'py.typed' "$stubs" "$fresh/kvferry/$stubs" || {
            echo "the stubs in $stubs are not those of its .proto files: run 'make gen'" >&2
            exit 1
        }
        ;;
    *)
        echo "usage: sh .ci/stubs.sh write|check" >&2
        exit 2
        ;;
esac
