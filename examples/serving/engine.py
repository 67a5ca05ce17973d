"""Serve: one thread that runs the model step by step for everybody's requests."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from pwcc.cache.errors import PwccError
from serving.scheduler import Busy, End, Event, Request, Scheduler, Work

Step = Callable[[Sequence[Work]], Sequence[int]]
"""Runs one batch, whose blocks are grown already, and returns the next token of every work."""


@dataclass
class Answer:
    """A whole generation."""

    tokens: list[int]
    end: End


@dataclass(frozen=True)
class Load:
    """What the engine is doing now, for metrics."""

    waiting: int
    running: int
    free_blocks: int
    total_blocks: int
    steps: int
    preempted: int
    refused: int
    prompt_tokens: int
    generated_tokens: int
    finished: dict[str, int] = field(default_factory=dict)


class Engine:
    """Owns the scheduler and the step; any thread may submit, cancel and ask for the load.

    A step that fails ends the requests of its batch with the error. After one that is not a ``PwccError`` (the
    device may be in any state) the engine ends every request and accepts no more; :attr:`broken` says why.
    """

    def __init__(self, step: Step, scheduler: Scheduler) -> None:
        self._step, self._scheduler = step, scheduler
        self._changed = threading.Condition()
        self._cancelled: list[Request] = []
        self.closing = False
        self._steps = 0
        self.broken: str | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        listener: Callable[[Event], None],
        *,
        stop: Iterable[int] = (),
    ) -> Request:
        """Queue a request; ``listener`` is called on the engine's thread and must return at once.

        Raises:
            Refused: it can never run. Busy: the queue is full, or the engine ends or is broken.
        """
        request = Request(tuple(prompt), max_new_tokens, listener, frozenset(stop))
        with self._changed:
            self._scheduler.check(request.prompt, max_new_tokens)
            if self.closing or self.broken:
                raise Busy(self.broken or "the server is about to end")
            self._scheduler.submit(request)
            self._changed.notify()
        return request

    def cancel(self, request: Request) -> None:
        """Stop a request before its next token; one that ended stays as it is."""
        with self._changed:
            self._cancelled.append(request)
            self._changed.notify()

    def generate(self, prompt: Sequence[int], max_new_tokens: int, *, stop: Iterable[int] = ()) -> Answer:
        """Generate and wait for the whole answer."""
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.submit(prompt, max_new_tokens, events.put, stop=stop)
        tokens: list[int] = []
        while not isinstance(event := events.get(), End):
            tokens.append(event)
        return Answer(tokens, event)

    def load(self) -> Load:
        """Return counts as of now."""
        with self._changed:
            scheduler, stats = self._scheduler, self._scheduler.stats
            return Load(
                waiting=len(scheduler.waiting),
                running=len(scheduler.running),
                free_blocks=scheduler.blocks.free_blocks,
                total_blocks=scheduler.blocks.num_blocks - 1,
                steps=self._steps,
                preempted=stats.preempted,
                refused=stats.refused,
                prompt_tokens=stats.prompt_tokens,
                generated_tokens=stats.generated_tokens,
                finished=dict(stats.finished),
            )

    def close(self, timeout: float = 30) -> bool:
        """Accept nothing more, finish what is there, and end; what takes longer is cancelled.

        Return whether everything could finish.
        """
        with self._changed:
            self.closing = True
            self._changed.notify()
        self._thread.join(timeout)
        finished = not self._thread.is_alive()
        if not finished:
            with self._changed:
                self._cancelled += [*self._scheduler.running, *self._scheduler.waiting]
            self._thread.join(timeout)
        return finished

    def _run(self) -> None:
        while True:
            with self._changed:
                while self._scheduler.idle and not self.closing:
                    self._changed.wait()
                for request in self._cancelled:
                    self._scheduler.end(request, End("cancelled"))
                self._cancelled.clear()
                if self._scheduler.idle:
                    if self.closing:
                        return
                    continue
                batch = self._scheduler.next_batch()
            self._advance(batch)

    def _advance(self, batch: Sequence[Work]) -> None:
        try:
            tokens = self._step(batch)
        except Exception as error:  # noqa: BLE001  a request's failure must not end the server
            end = End("error", str(error) or type(error).__name__)
            with self._changed:
                ended = [work.request for work in batch]
                if not isinstance(error, PwccError):
                    self.broken = f"a step failed: {type(error).__name__}: {error}"
                    ended = [*self._scheduler.running, *self._scheduler.waiting]
                for request in ended:
                    self._scheduler.end(request, end)
            return
        with self._changed:
            self._steps += 1
            self._scheduler.advance(batch, tokens)
