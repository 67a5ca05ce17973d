"""Key: what was seen of a model's code while it was built and run, before it becomes records."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import CodeType

Site = tuple[CodeType, int]


@dataclass(frozen=True, slots=True)
class Reader:
    """Who read something: the line as ``file.py:line``, and the module with its file, for naming files."""

    where: str
    module: str = ""
    module_file: str | None = None


@dataclass
class Observation:
    """Everything that was seen. Merging two is a union; nothing is ever taken back.

    ``complete`` tells that the model's construction was watched from its module's import on; ``problem``
    says why the eager run could not be made, and is empty where it was made.
    """

    environment: dict[str, Reader] = field(default_factory=dict)
    rewritten: dict[str, str] = field(default_factory=dict)
    """Variables that were read, and then given another value, by the line that did."""
    iterated: dict[str, str] = field(default_factory=dict)
    """Own code that looked through the whole environment: line -> line."""
    surveyed_by: set[str] = field(default_factory=set)
    """Installed packages that did."""
    places: dict[tuple[str, str], tuple[Reader, str]] = field(default_factory=dict)
    """(kind, path as given) -> who read it and the working directory then."""
    modules: dict[str, Reader] = field(default_factory=dict)
    unkeyed: set[str] = field(default_factory=set)
    """Files of the kernel's that were read (``/proc``), whose content is never the same twice."""
    sites: set[Site] = field(default_factory=set)
    """Lines on the way to a read of the environment or a probe."""
    complete: bool = True
    problem: str = ""

    def merge(self, other: Observation) -> None:
        """Add what another observation saw."""
        self.environment |= other.environment
        self.rewritten |= other.rewritten
        self.iterated |= other.iterated
        self.surveyed_by |= other.surveyed_by
        self.places |= other.places
        self.modules |= other.modules
        self.unkeyed |= other.unkeyed
        self.sites |= other.sites
        self.complete = self.complete and other.complete
        self.problem = self.problem or other.problem
