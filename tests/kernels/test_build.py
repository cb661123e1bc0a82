"""What is built is found, by whoever can use it; what cannot be built is said."""

import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
import torch

from tests.own_process import python
from vllm_kvselect.kernels import build
from vllm_kvselect.kernels.build import KernelError

USE = """
import torch
from vllm_kvselect.kernels import cpu
cpu.load()
print(*torch.ops.loaded_libraries)
print(cpu.best_mask(torch.tensor([[1.0, 3.0, 2.0]]), torch.tensor([2])).tolist())
"""


@pytest.fixture(scope="module")
def library() -> Path:
    """The library of this machine, built at most once for all tests."""
    build.load_library()
    return build.library_path()


def use(folder: Path, **environment: str) -> str:
    """Loads the kernels in a process of its own, runs one, and returns which library it loaded."""
    result = python("-c", USE, TORCH_EXTENSIONS_DIR=str(folder), **environment)
    library, mask = result.stdout.splitlines()
    assert mask == "[[False, True, True]]"
    return library


def without(program: str, folder: Path) -> str:
    """A PATH on which all is found that is needed to build, but for one program."""
    names = {"c++", "cc1plus", "ninja", "as", "ld", "sh", "uname", "which"} - {program}
    for name in names:
        if found := shutil.which(name):
            (folder / name).symlink_to(found)
    return str(folder)


@pytest.fixture
def nothing_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "built"))
    return tmp_path / "built"


@pytest.fixture
def small_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Compiled in a second instead of half a minute; torch compiles nothing twice in a process."""
    source = tmp_path / "source" / "library.cpp"
    source.parent.mkdir()
    source.write_text(f"int zero() {{ return 0; }}  // {tmp_path}")
    monkeypatch.setattr(build, "_SOURCE", source)
    return source


def test_a_complete_library_needs_no_compiler_no_ninja_and_no_writable_folder(
    library: Path, tmp_path: Path
) -> None:
    built, empty = tmp_path / "built", tmp_path / "empty"
    built.mkdir()
    empty.mkdir()
    shutil.copy(library, built)
    built.chmod(0o555)

    use(built, PATH=str(empty))

    # root may write anywhere, so that nothing was written says more than the folder's mode.
    assert list(built.iterdir()) == [built / library.name]


@pytest.mark.usefixtures("small_source")
def test_what_a_killed_process_left_behind_is_not_waited_for(nothing_built: Path) -> None:
    library = build.library_path()
    left = nothing_built / library.with_suffix(".build").name
    left.mkdir(parents=True)
    for name in ("lock", library.name):
        (left / name).touch()

    build.load_library()

    assert not left.exists()
    assert library.stat().st_size > 0


def test_another_instruction_set_has_another_library(monkeypatch: pytest.MonkeyPatch) -> None:
    names = set()
    for capability in ("AVX2", "AVX512"):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda name=capability: name)
        names.add(build.library_path().name)
    assert len(names) == 2


def test_a_library_uses_no_instruction_that_its_name_does_not_tell(library: Path) -> None:
    """A home may be shared, and an image copied, by machines of the same name only."""
    if "_avx2_" not in library.name or shutil.which("objdump") is None:
        pytest.skip("registers tell AVX-512 from AVX2, nothing that simple tells more")
    command = ["objdump", "--disassemble", "--no-show-raw-insn", str(library)]
    assembly = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "%ymm" in assembly
    assert "%zmm" not in assembly


def test_torchs_own_switch_for_older_instructions_is_followed(library: Path) -> None:
    assert "_avx2_" in use(library.parent, ATEN_CPU_CAPABILITY="avx2")


def test_processors_that_the_kernels_are_not_made_for_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "SVE256")
    with pytest.raises(KernelError, match=r"made for x86-64 .* finds 'SVE256' here"):
        build.load_library()


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("c++", r"there is no C\+\+ compiler \(c\+\+\); install g\+\+"),
        ("ninja", r"ninja is missing; install it \(pip install ninja\)"),
    ],
)
@pytest.mark.usefixtures("nothing_built")
def test_a_missing_program_is_named(
    program: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "programs").mkdir()
    monkeypatch.setenv("PATH", without(program, tmp_path / "programs"))
    monkeypatch.setattr(build.sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(KernelError, match=message):
        build.load_library()


@pytest.mark.usefixtures("nothing_built", "small_source")
def test_ninja_is_found_beside_python_where_the_environment_is_not_activated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not (Path(sysconfig.get_path("scripts")) / "ninja").exists():
        pytest.skip("ninja was not installed with pip")
    (tmp_path / "programs").mkdir()
    monkeypatch.setenv("PATH", without("ninja", tmp_path / "programs"))
    build.load_library()


def test_a_folder_that_cannot_be_made_is_named(nothing_built: Path) -> None:
    nothing_built.write_text("a file, so that nobody, not even root, can make a folder here")
    with pytest.raises(KernelError, match=r"built cannot be written .*; set TORCH_EXTENSIONS_DIR"):
        build.load_library()


@pytest.mark.usefixtures("nothing_built")
def test_the_compilers_first_complaint_is_passed_on(small_source: Path) -> None:
    small_source.write_text("int main() { return nothing_like_it; }")
    with pytest.raises(KernelError, match=r"error: .*nothing_like_it.*; try another version"):
        build.load_library()


def test_a_broken_library_is_named(nothing_built: Path) -> None:
    nothing_built.mkdir()
    build.library_path().write_bytes(b"not a library")
    with pytest.raises(KernelError, match=r"\.so cannot be loaded \(.*\); delete it"):
        build.load_library()
