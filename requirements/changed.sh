#!/bin/sh
# changed.sh STAMP FILE...: print the files whose content is not that of which STAMP has digests; nothing if it has all.
stamp=$1
shift
sha256sum "$@" | if [ -s "$stamp" ]; then grep -vxF -f "$stamp"; else cat; fi | cut -c67- | xargs
