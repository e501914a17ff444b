"""Stands in for SGLang where a fault cannot be made for real; it speaks the real protocol.

HTTP as ``/generate`` answers it, dumps written by the plugin's own `Assembly` into a real spool, a state file that says
it is up. Its states are causal (a row depends on the tokens up to it), and its logprobs follow from them by the final norm
and head of a real checkpoint, so that every rule holds until a fault is put in.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

from hs_assets.capture.assembly import DumpFacts
from hs_assets.config import Project
from hs_assets.samples.eagle3 import DTYPES
from hs_assets.samples.model import Head, load_head
from hs_assets.serving.launch import Target, make_launch_plan, resolve
from hs_assets.serving.state import UP, ServerFolder, ServerState, started
from hs_assets.wire.rid import Rid, parse_rid
from hs_assets.wire.spool import Spool
from hs_assets_tests.dump_material import make_assembly, make_chunk

Fault = Callable[[Rid, np.ndarray], np.ndarray | int | None]
"""Gets a request and its states [T, K+1, H] float32; gives the states to deliver, an HTTP status, or None for no dump."""

Generate = Callable[[list[int], dict[str, Any]], dict[str, object] | int]
"""Gets a prompt's ids and how to draw; gives what ``/generate`` answers, or an HTTP status."""


LAST_SPECIAL_ID = 8
"""Of the tokenizer that tiny checkpoints have."""


class FakeServer:
    """Counts the requests it gets: ``rows`` are theirs, in order; ``asked`` are the prompts it generated for, ``aborted`` what it
    was told to end."""

    def __init__(self, project: Project, target: Target, fault: Fault) -> None:
        self.rows: list[int] = []
        self.fault = fault
        self.asked: list[list[int]] = []
        self.aborted: list[str] = []
        self.generate: Generate = echo_last_words
        self.seconds_each = 0.0
        self._target = target
        self._spool = Spool(project.spool_path)
        self._spool.make()
        dtype = {"bfloat16": "BF16", "float32": "F32"}[project.settings.server.dtype]
        ids, hidden = target.layer_set.residual_ids, target.facts.hidden_size
        self._dtype = DTYPES[dtype]
        self._assembly = make_assembly(DumpFacts("fake", target.spec.fingerprint, ids, hidden, dtype), self._spool)
        self._lock = threading.Lock()
        random = np.random.default_rng(5)
        self._embedding = random.standard_normal((target.facts.vocab_size, len(ids), hidden)).astype(np.float32)
        head = load_head(target.facts)
        assert isinstance(head, Head)
        self._head = head

    def answer(self, body: dict[str, Any]) -> tuple[int, dict[str, object]]:
        rid = parse_rid(str(body["rid"]))
        if rid is None:
            return self._generated(body["input_ids"], body["sampling_params"])
        tokens = np.asarray(body["input_ids"], "<i4")
        steps = np.arange(1, len(tokens) + 1, dtype=np.float32)[:, None, None]
        states = np.cumsum(self._embedding[tokens], axis=0) / np.sqrt(steps)
        final = states[-1, -1].astype(self._dtype)
        time.sleep(self.seconds_each)
        with self._lock:
            self.rows.append(rid.row)
            outcome = self.fault(rid, states)
            if isinstance(outcome, int):
                return outcome, {"error": {"message": "made to fail"}}
            if outcome is not None:
                delivered = np.ascontiguousarray(outcome.astype(self._dtype))
                files = self._spool.dump(str(rid))
                self._assembly.add(files, rid, 0, make_chunk(tokens, delivered))
        logits = self._head.logits(final, np.arange(self._target.facts.vocab_size))
        logprobs = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
        top = [[float(logprobs[i]), int(i), None] for i in np.argsort(-logprobs)[:20]]
        info = {"prompt_tokens": len(tokens), "cached_tokens": 0, "output_top_logprobs": [top]}
        return 200, {"meta_info": info}

    def _generated(self, input_ids: list[int], parameters: dict[str, Any]) -> tuple[int, dict[str, object]]:
        time.sleep(self.seconds_each)
        with self._lock:
            self.asked.append(input_ids)
        made = self.generate(input_ids, parameters)
        return (made, {"error": {"message": "made to fail"}}) if isinstance(made, int) else (200, made)


def generated(output_ids: list[int], finish: str, **fields: object) -> dict[str, object]:
    """What ``/generate`` answers."""
    return {"text": "", "output_ids": output_ids, "meta_info": {"finish_reason": {"type": finish, **fields}}}


def echo_last_words(input_ids: list[int], parameters: dict[str, Any]) -> dict[str, object]:
    """An answer that differs from prompt to prompt: some of the prompt's own ids, without special tokens, and a stop."""
    plain = [i for i in input_ids if i > LAST_SPECIAL_ID]
    (stop,) = parameters["stop_token_ids"]
    return generated([*plain[-5:], stop], "stop", matched=stop)


class _Listener(ThreadingHTTPServer):
    """Takes as many connections at once as a client opens; the usual five would reset some on a busy machine."""

    request_queue_size = 256


def healthy(_rid: Rid, states: np.ndarray) -> np.ndarray:
    """No fault."""
    return states


@contextmanager
def fake_server(project: Project, fault: Fault = healthy) -> Iterator[FakeServer]:
    """A fake server that the project's runs take for the one they would have started."""
    target = resolve(project)
    plan = make_launch_plan(project, target)
    server = FakeServer(project, target, fault)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/abort_request":
                server.aborted.append(body["rid"])
            status, answer = server.answer(body) if self.path == "/generate" else (200, {})
            payload = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        def log_message(self, *_: object) -> None:
            """Quiet."""

    with _Listener(("127.0.0.1", 0), Handler) as http:
        http.daemon_threads = True
        threading.Thread(target=http.serve_forever, daemon=True).start()
        folder = ServerFolder(project.home.server)
        folder.make()
        created = started(os.getpid())
        state = ServerState(
            phase=UP,
            identity=plan.identity,
            server="fake",
            url=f"http://127.0.0.1:{http.server_address[1]}",
            spool=plan.spool,
            spool_bytes=plan.spool_bytes,
            backlog_bytes=plan.backlog_bytes,
            residual_ids=plan.residual_ids,
            state_fingerprint=plan.state_fingerprint,
            model_path=plan.model_path,
            sglang_version=plan.sglang_version,
            pid=os.getpid(),
            pid_created=created,
            watchdog_pid=os.getpid(),
            watchdog_created=created,
            log=str(Path(folder.logs, "none.log")),
            started_at=time.time(),
            message="a fake",
        )
        state.write(folder.state)
        try:
            yield server
        finally:
            folder.state.unlink()
            http.shutdown()
