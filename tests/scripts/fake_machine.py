"""A machine whose python, pip, uv and nvidia-smi are short scripts that log their calls."""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
TOOLS = ("bash", "cat", "chmod", "cksum", "cp", "dirname", "grep", "mkdir", "sleep")

# Python for everything but pip. It imports torch only from the folder that the fakes install into.
PYTHON = r"""
case "$1 ${2:-}" in
  "-m venv")
    if [ "$FAKE_VENV_MODULE" = no ]; then exit 1; fi
    mkdir -p "$3/bin" && cp "$FAKES/python" "$3/bin/python" ;;
  "-m pip") shift 2; exec "$FAKES/pip" "$@" ;;
  "-m ensurepip") exit 1 ;;
  "-c import torch"*) PYTHONPATH="$FAKES/site" exec "$REAL_PYTHON" -S "$@" ;;
  *) exec "$REAL_PYTHON" -S "$@" ;;
esac
"""

# FAKE_PIP and FAKE_UV: yes, any (not the tested version of PyTorch) or no (nothing is reached).
# FAKE_LOCKED=no: one of the versions of .ci/constraints.txt is not to be had.
INSTALL = r"""
case "$OFFERS $*" in
  no*) exit 1 ;;
  *--constraint*) [ "$FAKE_LOCKED" != no ] ;;
  *--editable*) ;;
  "any "*"torch==2.13.0"*) exit 1 ;;
  *torch*) echo '__version__ = "2.13.0"' >"$FAKES/site/torch.py" ;;
  *) exit 1 ;;
esac
"""

PIP = (
    r"""
echo "pip $*" >>"$FAKES/calls.log"
OFFERS="$FAKE_PIP"
case "$*" in
  --version) exit ;;
  "config list") echo "$FAKE_PIP_CONFIG"; exit ;;
  *" uv")
    [ "$FAKE_UV_FROM_PIP" = yes ] || exit 1
    cp "$FAKES/uv" "$VENV/bin/uv"; exit ;;
esac
"""
    + INSTALL
)

UV = (
    r"""
echo "uv $*" >>"$FAKES/calls.log"
OFFERS="$FAKE_UV"
case "$*" in
  venv*)
    mkdir -p "$VENV/bin" && cp "$FAKES/python" "$VENV/bin/python"
    exit ;;
esac
"""
    + INSTALL
)


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one call of prepare_env did."""

    code: int
    messages: str  # its stderr
    tried: list[str]  # "TOOL VERSION", in order
    calls: list[str]  # of pip and uv, in order


class FakeMachine:
    """A copy of scripts/_env.sh and the fakes it meets, below `folder`."""

    def __init__(self, folder: Path) -> None:
        """Write the fakes."""
        self.root, self.fakes = folder / "repository", folder / "fakes"
        self.bin = folder / "bin"
        for path in (self.root / "scripts", self.fakes / "site", self.bin):
            path.mkdir(parents=True)
        shutil.copy(REPOSITORY / "scripts" / "_env.sh", self.root / "scripts")
        shutil.copy(REPOSITORY / "pyproject.toml", self.root)
        for tool in TOOLS:
            (self.bin / tool).symlink_to(str(shutil.which(tool)))
        fakes = {"python": PYTHON, "pip": PIP, "uv": UV}
        for name, text in fakes.items():
            path = self.fakes / name
            path.write_text(f"#!{shutil.which('bash')}\nset -eu\n{text}")
            path.chmod(0o755)
        self.put_on_path("python3", "python")
        self.settings = {
            "FAKE_PIP": "yes",
            "FAKE_PIP_CONFIG": "",
            "FAKE_UV": "yes",
            "FAKE_UV_FROM_PIP": "no",
            "FAKE_VENV_MODULE": "yes",
        }

    def put_on_path(self, name: str, fake: str) -> None:
        """Make a fake reachable as the command `name`."""
        (self.bin / name).symlink_to(self.fakes / fake)

    def bash(self, code: str) -> subprocess.CompletedProcess[str]:
        """Run bash code after sourcing _env.sh, as the scripts do."""
        environment = {
            "PATH": str(self.bin),
            "HOME": os.environ.get("HOME", "/"),
            "FAKES": str(self.fakes),
            "REAL_PYTHON": sys.executable,
            "VENV": str(self.root / ".venv"),
            **self.settings,
        }
        return subprocess.run(
            ["bash", "-c", f"set -euo pipefail; source scripts/_env.sh; {code}"],
            cwd=self.root,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def prepare(self, extra: str = "") -> Result:
        """Run prepare_env."""
        log = self.fakes / "calls.log"
        log.write_text("")
        done = self.bash(f'prepare_env "{extra}"')
        tried = []
        for line in done.stderr.splitlines():
            if "trying torch" in line:
                requirement, tool = line.split("trying ")[1].split(" with ")
                tool = Path(tool).name
                version = "tested" if requirement == "torch==2.13.0" else "any"
                tried.append(f"{tool} {version}")
        calls = log.read_text().splitlines()
        return Result(code=done.returncode, messages=done.stderr, tried=tried, calls=calls)
