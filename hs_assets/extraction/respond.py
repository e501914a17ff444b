"""Have the target model answer one partition: what was generated before is taken, the rest is asked for, many at once."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from hs_assets.config import Project
from hs_assets.errors import ConfigError, ServerDiedError
from hs_assets.extraction.extract import Say, alone
from hs_assets.extraction.generations import GenerationLog
from hs_assets.extraction.intake import SERVER_DIED
from hs_assets.extraction.progress import SAY_SECONDS, Progress
from hs_assets.extraction.status import source_of
from hs_assets.samples.answers import Answered, AnswerRules, Generation, answer
from hs_assets.samples.conversations import Conversation, Dropped
from hs_assets.samples.model import stop_token_ids
from hs_assets.samples.prepare import parse_source_row
from hs_assets.samples.responses import GenerationSpec, ResponseRow, Responses, make_responses
from hs_assets.samples.sources import Source, SourceRow, read_partition
from hs_assets.samples.tokenizer import ChatTokenizer, load_tokenizer
from hs_assets.serving.generate import AnswerFailedError, GenerateClient
from hs_assets.serving.launch import Target, make_launch_plan
from hs_assets.serving.server import lease_server
from hs_assets.serving.spec import weight_fingerprint
from hs_assets.serving.state import ServerFolder, ServerState
from hs_assets.wire.dump import token_sha256

_SEEDED = "--enable-deterministic-inference"


@dataclass(slots=True)
class RespondReport:
    """What a run did with a partition. ``responses``: None unless every row is answered or dropped; seconds of asking."""

    rows: int
    responses: Responses | None = None
    failed: dict[int, tuple[str, str]] = field(default_factory=dict)
    """Row → reason and detail."""
    requests: int = 0
    output_tokens: int = 0
    seconds: float = 0.0
    server: ServerState | None = None
    died: str | None = None

    @property
    def problems(self) -> list[str]:
        """Why the partition is not complete; empty if it is."""
        counts: dict[str, int] = {}
        for reason, _ in self.failed.values():
            counts[reason] = counts.get(reason, 0) + 1
        problems = [f"{count} rows failed: {reason}" for reason, count in sorted(counts.items())]
        return problems + ([self.died] if self.died else [])


class _NotGeneratedError(Exception):
    """An answer is not in the log."""


def generation_spec(project: Project, tokenizer: ChatTokenizer) -> GenerationSpec:
    """What the configured answers depend on; starts nothing."""
    settings = project.settings
    chosen, path = settings.responses, settings.model.path
    return GenerationSpec(
        model=path.name,
        weight_fingerprint=weight_fingerprint(path),
        dtype=settings.server.dtype,
        template_sha256=tokenizer.template_sha256,
        tokenizer_sha256=tokenizer.tokenizer_sha256,
        temperature=chosen.temperature,
        top_p=chosen.top_p,
        seed=chosen.seed,
        max_tokens=chosen.max_tokens,
        stop_token_ids=stop_token_ids(path, tokenizer.eos_token_id),
    )


def choice(project: Project) -> str:
    """What is kept of what was generated; a change of it asks for nothing."""
    chosen = project.settings.responses
    return f"keep_thinking={chosen.keep_thinking}, cut={chosen.cut}"


def respond(project: Project, target: Target, key: str, say: Say) -> RespondReport:
    """Answer what is not answered yet of a partition. A run that is cut short leaves every turn that was generated.

    Raises:
        HsAssetsError: it cannot begin. What goes wrong later is in the report's `problems`.
    """
    settings = project.settings
    chosen = settings.responses
    if chosen.seed is not None and chosen.temperature > 0 and _SEEDED not in settings.server.args:
        remedy = f'add "{_SEEDED}" to server.args, or take the seed out'
        raise ConfigError("SGLang would ignore the seed", where="responses.seed", got=chosen.seed, remedy=remedy)
    with alone(project, f"{key}.responses", say):
        tokenizer = load_tokenizer(settings.model.path, trust_remote_code=settings.model.trust_remote_code)
        source = source_of(project, key)
        rows = read_partition(project.home.prompts / "index", source, key, settings.prompts.max_row_bytes)
        spec = generation_spec(project, tokenizer)
        rules = AnswerRules(
            max_tokens=spec.max_tokens,
            context_length=target.facts.max_prompt_tokens,
            vocab_size=target.facts.vocab_size,
            stop_token_ids=spec.stop_token_ids,
            keep_thinking=chosen.keep_thinking,
            cut=chosen.cut,
        )
        report = RespondReport(len(rows))
        with GenerationLog(project.home.responses / f"{key}.jsonl", spec.fingerprint) as log:
            answering = _Answering(source, key, rows, tokenizer, spec, rules, log, report)
            done = answering.from_log()
            if len(done) < len(rows):
                with _client(project, target, key, report, say) as client:
                    done |= answering.from_server(client, sorted(set(range(len(rows))) - done.keys()), say)
            report.requests, report.output_tokens = log.added, log.added_tokens
    if not report.failed:
        made = tuple(ResponseRow(row.number, row.sha256, done[number]) for number, row in enumerate(rows))
        report.responses = make_responses(key, spec, choice(project), made)
    return report


@contextmanager
def _client(project: Project, target: Target, key: str, report: RespondReport, say: Say) -> Iterator[GenerateClient]:
    server, folder = project.settings.server, ServerFolder(project.home.server)
    with (
        lease_server(folder, make_launch_plan(project, target), f"responses to {key}", say) as state,
        GenerateClient(folder, state, server.max_in_flight, server.request_timeout_seconds) as client,
    ):
        report.server = state
        began = time.monotonic()
        try:
            yield client
        finally:
            report.seconds = time.monotonic() - began


@dataclass(frozen=True, slots=True)
class _Answering:
    """The rows of a partition on their way to answers."""

    source: Source
    key: str
    rows: Sequence[SourceRow]
    tokenizer: ChatTokenizer
    spec: GenerationSpec
    rules: AnswerRules
    log: GenerationLog
    report: RespondReport

    def from_log(self) -> dict[int, Answered | Dropped]:
        """The rows that need no server."""
        done = {}
        for number in range(len(self.rows)):
            try:
                done[number] = self._row(number, None)
            except _NotGeneratedError:
                continue
        return done

    def from_server(self, client: GenerateClient, numbers: list[int], say: Say) -> dict[int, Answered | Dropped]:
        """Those rows with the server's help; what failed is in the report."""
        done: dict[int, Answered | Dropped] = {}
        with ThreadPoolExecutor(client.connections, "hs-assets-answer") as pool:
            waiting = {pool.submit(self._row, number, client): number for number in numbers}
            progress = Progress(len(numbers), "rows", say)
            try:
                while waiting:
                    finished, _ = wait(waiting, timeout=SAY_SECONDS, return_when=FIRST_COMPLETED)
                    for future in finished:
                        self._take(future, waiting.pop(future), done, client)
                    progress.tell(len(numbers) - len(waiting), self.log.added_tokens)
            except BaseException:
                client.give_up()
                pool.shutdown(cancel_futures=True)
                raise
        return done

    def _take(
        self, future: Future[Answered | Dropped], number: int, done: dict[int, Answered | Dropped], client: GenerateClient
    ) -> None:
        try:
            done[number] = future.result()
        except AnswerFailedError as error:
            self.report.failed[number] = error.reason, error.problem
        except ServerDiedError as error:
            client.give_up()
            self.report.died = self.report.died or str(error)
            self.report.failed[number] = SERVER_DIED, error.problem

    def _row(self, number: int, client: GenerateClient | None) -> Answered | Dropped:
        """The answers to a row; raises _NotGeneratedError where one must be asked for, and there is no client."""
        row, spec = self.rows[number], self.spec
        parsed = parse_source_row(row, self.source.format)
        if isinstance(parsed.content, Dropped):
            return parsed.content
        if not isinstance(parsed.content, Conversation):
            return Dropped("response_not_a_chat", f"the row came as {parsed.format}: there is no question to ask")

        def ask(turn: int, ids: list[int]) -> Generation:
            prompt_sha256 = token_sha256(np.asarray(ids, "<i4").tobytes())
            made = self.log.find(row.sha256, turn, prompt_sha256)
            if made is None:
                if client is None:
                    raise _NotGeneratedError
                made = client.ask(f"{self.key}.{number:04d}.{turn}", ids, _parameters(spec, row.sha256, turn))
                self.log.add(row.sha256, turn, prompt_sha256, made)
            return made

        return answer(parsed.content, self.tokenizer, self.rules, ask)


def _parameters(spec: GenerationSpec, source_sha256: str, turn: int) -> dict[str, object]:
    """How an answer is drawn, as ``/generate`` takes it; each turn has a seed of its own, or all would draw alike."""
    parameters: dict[str, object] = {
        "temperature": spec.temperature,
        "top_p": spec.top_p,
        "max_new_tokens": spec.max_tokens,
        "stop_token_ids": list(spec.stop_token_ids),
    }
    if spec.seed is not None:
        digest = hashlib.sha256(f"{spec.seed}/{source_sha256}/{turn}".encode()).digest()
        parameters["sampling_seed"] = int.from_bytes(digest[:4]) >> 1
    return parameters
