#!/bin/sh
# python.sh VENV [PYTHON]: print the interpreter to make the environment VENV with; say on standard error which, and why.
#
# PYTHON is an interpreter, or a version such as 3.12. Without it, it is the interpreter of VENV, if that is there, else the
# newest fitting one of the path, of pyenv and of uv. It fits if it is a standard CPython of one of MINORS that can make
# environments.
MINORS="13 12 11" # newest first, as requires-python in pyproject.toml
venv=$1 wanted=$2

fits='import sys, sysconfig, venv, ensurepip
v, free = sys.version_info, sysconfig.get_config_var("Py_GIL_DISABLED")
print("%d.%d.%d" % v[:3] + (" without GIL" if free else ""))
sys.exit(sys.implementation.name != "cpython" or bool(free) or v[0] != 3 or v.releaselevel != "final" or str(v[1]) not in sys.argv[1].split())'

version_of() { "$1" -c "$fits" "$MINORS" 2>/dev/null; }

candidates() { # of Python 3.$1; a name of the path may be a shim that starts nothing
	printf '%s\n' "python3.$1" python3 python
	printf '%s\n' "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3."$1".*/bin/python3."$1" \
		"${UV_PYTHON_INSTALL_DIR:-${XDG_DATA_HOME:-$HOME/.local/share}/uv/python}"/cpython-3."$1".*/bin/python3."$1" | sort -rV
}

find_minor() { # print an interpreter of Python 3.$1, and set version
	IFS='
' # one candidate a line
	for python in $(candidates "$1"); do
		version=$(version_of "$python") && [ "${version%.*}" = "3.$1" ] && found=$(command -v "$python") && return
	done
	return 1
}

install="install one, as with \"uv python install 3.${MINORS%% *}\" or \"pyenv install 3.${MINORS%% *}\""
needs="hybrid3d needs Python 3.${MINORS##* } to 3.${MINORS%% *} (CPython, with venv and ensurepip)"
if [ -n "$wanted" ]; then
	missing="no such interpreter"
	case $wanted in
	3.[0-9] | 3.[0-9][0-9])
		missing="none that fits on the path, in pyenv or in uv"
		! find_minor "${wanted#3.}" || wanted=$found
		;;
	esac
	if ! version=$(version_of "$wanted"); then
		echo "$needs, but PYTHON=$wanted is ${version:-$missing}: leave PYTHON out to take the newest that" \
			"fits, or $install" >&2
		exit 1
	fi
	if made=$(version_of "$venv/bin/python") && [ "${made%.*}" != "${version%.*}" ]; then
		echo "$venv is of Python $made, and PYTHON=$wanted is $version: remove $venv, or leave PYTHON out" >&2
		exit 1
	fi
	echo "$wanted"
	exit 0
fi
if [ -x "$venv/bin/python" ]; then
	if made=$(version_of "$venv/bin/python"); then
		echo "$venv/bin/python"
		exit 0
	fi
	echo "$needs, but $venv is of Python ${made:-that does not start}: remove it" >&2
	exit 1
fi
for minor in $MINORS; do
	find_minor "$minor" || continue
	why="the newest that hybrid3d is for"
	[ "$minor" = "${MINORS%% *}" ] || why="no Python 3.${MINORS%% *} was found on the path, in pyenv or in uv"
	[ "$minor" != 11 ] || why="$why; Megatron-Core 0.16.1 is the last for 3.11"
	echo "Python $version ($found): $why. PYTHON=... chooses another" >&2
	echo "$found"
	exit 0
done
echo "$needs, and none was found on the path, in pyenv or in uv: $install, or run make PYTHON=/path/to/python" >&2
exit 1
