"""Model names (`name:tag`): one spelling, safe as folder names, and near matches for whoever mistypes one."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection
from dataclasses import dataclass

DEFAULT_TAG = "latest"
_PART = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


class ModelError(Exception):
    """A model cannot be found, fetched or used; the message says what was found and what to do."""


class ModelNameError(ModelError):
    """A model's name has characters or parts that no model's name has."""


@dataclass(frozen=True, order=True, slots=True)
class ModelName:
    """A name and its tag, lower-case; `tag` is "" where none was given."""

    name: str
    tag: str = ""

    @classmethod
    def parse(cls, text: str) -> ModelName:
        """Read "name" or "name:tag", in any case.

        Raises:
            ModelNameError: anything else, so also everything that could leave a folder ("..", "/").
        """
        name, colon, tag = text.strip().lower().partition(":")
        if not _PART.fullmatch(name) or (colon and not _PART.fullmatch(tag)):
            raise ModelNameError(
                f"{text!r} is not a model name; expected name or name:tag of letters, digits, '.', '_' "
                "and '-', each starting with a letter or digit and at most 64 long"
            )
        return cls(name, tag)

    @classmethod
    def from_stem(cls, stem: str) -> ModelName:
        """The name for a file called `stem`: what a name may not hold becomes "-".

        Raises:
            ModelNameError: nothing usable is left.
        """
        return cls.parse(re.sub(r"[^a-z0-9._-]+", "-", stem.lower()).lstrip("._-")[:64])

    def with_tag(self) -> ModelName:
        """The same name, with the default tag where it had none."""
        return self if self.tag else ModelName(self.name, DEFAULT_TAG)

    def __str__(self) -> str:
        return f"{self.name}:{self.tag}" if self.tag else self.name


def choose(wanted: ModelName, among: Collection[str]) -> list[str]:
    """The full names that `wanted` may mean: itself, or without a tag the default one, else any."""
    if wanted.tag:
        return [str(wanted)] if str(wanted) in among else []
    if str(wanted.with_tag()) in among:
        return [str(wanted.with_tag())]
    return sorted(name for name in among if name.partition(":")[0] == wanted.name)


def did_you_mean(wanted: str, among: Collection[str]) -> str:
    """A clause for an error message that names the nearest of `among`, or "" when nothing is near."""
    candidates = {name: name for name in among} | {name.partition(":")[0]: name for name in sorted(among)}
    near = difflib.get_close_matches(wanted.lower(), list(candidates), n=3, cutoff=0.6)
    names = list(dict.fromkeys(candidates[match] for match in near))
    return f"; did you mean {' or '.join(names)}?" if names else ""
