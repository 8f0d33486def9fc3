"""What a release holds and that it works from its wheel alone; nothing here needs the package registry."""

from __future__ import annotations

import sysconfig
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

from conftest import PROJECT, Distributions, VirtualEnvironment

import pgmemory


def files_below(*folders: str) -> set[str]:
    """Return the project's files below the folders, relative to the project, without compiled ones."""
    return {
        path.relative_to(PROJECT).as_posix()
        for folder in folders
        for path in (PROJECT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_wheel_holds_the_package_with_its_data_and_nothing_else(distributions: Distributions) -> None:
    with zipfile.ZipFile(distributions.wheel) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert "pgmemory/py.typed" in names
    assert any(name.startswith("pgmemory/migrations/") and name.endswith(".sql") for name in names)
    assert names == files_below("pgmemory")


def test_the_wheel_knows_its_version_its_licence_and_its_command(distributions: Distributions) -> None:
    (distribution,) = metadata.distributions(path=[str(distributions.wheel)])
    assert distribution.metadata["Name"] == "langchain-pgmemory"
    assert distribution.version == pgmemory.__version__
    assert distribution.metadata["License"] == "MIT" or distribution.metadata["License-Expression"] == "MIT"
    assert [(entry.name, entry.value) for entry in distribution.entry_points] == [("pgmemory", "pgmemory.cli:main")]


def test_the_sdist_holds_what_one_needs_to_build_test_and_read(distributions: Distributions) -> None:
    with tarfile.open(distributions.sdist) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    single = {"CHANGELOG.md", "LICENSE", "Makefile", "README.md", "pyproject.toml", "schema.sql", "setup.cfg"}
    assert (single | files_below("pgmemory", "examples", "tests", "docs")) - names == set()


def test_the_installed_wheel_starts_its_command_and_sets_up_a_schema(
    distributions: Distributions, virtual_environment: VirtualEnvironment, server_dsn: str, schema_name: str
) -> None:
    environment = virtual_environment
    environment.run("python", "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", distributions.wheel)
    # The dependencies come from the environment of this test; what a path file names is searched last.
    (site_packages,) = environment.folder.glob("lib/python*/site-packages")
    (site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))

    assert pgmemory.__version__ in environment.run("pgmemory", "--version")
    code = """if True:
        import sys
        from pgmemory import ConversationStore, __file__
        with ConversationStore(sys.argv[1], schema=sys.argv[2]) as store:
            store.setup()
        print(__file__)
    """
    imported = environment.run("python", "-c", code, server_dsn, schema_name)
    assert Path(imported.strip()).is_relative_to(environment.folder)
