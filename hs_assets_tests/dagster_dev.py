"""`dagster dev` with its daemon, in a folder of its own, and its pages in a headless Chromium, used as a person would."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

from hs_assets.serving.watchdog import free_port

CHECKOUT = Path(__file__).resolve().parents[1]
SECONDS = 300
"""How long is waited for runs: a server's start and twelve partitions, on two cores that others use too."""

STEP_SECONDS = 60
"""How long is waited for a page to do what was clicked."""

_STATS = """query ($key: AssetKeyInput!) { assetNodeOrError(assetKey: $key) { ... on AssetNode { partitionStats {
    Materialized: numMaterialized Failed: numFailed Materializing: numMaterializing } } } }"""
_STALE = """query ($key: AssetKeyInput!, $partition: String!) { assetNodeOrError(assetKey: $key) { ... on AssetNode {
    staleStatus(partition: $partition) } } }"""
_STARTED = "{ repositoriesOrError { ... on RepositoryConnection { nodes { name } } } }"


@dataclass(frozen=True, slots=True)
class DagsterDev:
    """A `dagster dev` that is up; ``log`` is what it printed."""

    pid: int
    url: str
    log: Path

    def ask(self, query: str, **variables: object) -> dict[str, Any]:
        """The data that the webserver answers to a GraphQL query."""
        body = {"query": query, "variables": variables}
        answer = httpx.post(f"{self.url}/graphql", json=body, timeout=60, trust_env=False).raise_for_status().json()
        assert "errors" not in answer, answer["errors"]
        return dict(answer["data"])

    def partition_stats(self, asset: str) -> dict[str, int]:
        """Status, as a page names it → partitions of an asset that have it; without those that are missing."""
        return dict(self.ask(_STATS, key={"path": [asset]})["assetNodeOrError"]["partitionStats"])

    def stale(self, asset: str, partitions: Sequence[str]) -> list[str]:
        """What the webserver says of partitions: ``FRESH``, ``STALE`` or ``MISSING``."""
        asked = [self.ask(_STALE, key={"path": [asset]}, partition=partition) for partition in partitions]
        return [answer["assetNodeOrError"]["staleStatus"] for answer in asked]

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-6000:]


@contextmanager
def dagster_dev(folder: Path) -> Iterator[DagsterDev]:
    """`dagster dev` in the folder of a home `.hs_assets`; with the checkout's workspace.yaml and dagster.yaml if it has none."""
    for name in ("workspace.yaml", "dagster.yaml"):
        if not (folder / name).exists():
            shutil.copy(CHECKOUT / name, folder / name)
    port, log = free_port(), folder / "dagster-dev.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [Path(sys.executable).with_name("dagster"), "dev", "--port", str(port)],
            cwd=folder,
            env={key: value for key, value in os.environ.items() if not key.startswith("DAGSTER")},
            stdout=output,
            stderr=output,
        )
    dev = DagsterDev(process.pid, f"http://127.0.0.1:{port}", log)
    try:
        wait_for("dagster dev", lambda: _is_up(dev), dev.tail)
        yield dev
    finally:
        process.terminate()
        process.wait(60)


def _is_up(dev: DagsterDev) -> bool:
    try:
        return bool(dev.ask(_STARTED)["repositoriesOrError"].get("nodes"))
    except httpx.HTTPError:
        return False


def wait_for(what: str, holds: Callable[[], bool], tail: Callable[[], str], every: float = 0.5) -> None:
    """Ask until it holds, each `every` seconds; fails with what `tail` says where it does not in `SECONDS`."""
    deadline = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < deadline, f"{what}: not after {SECONDS} s\n{tail()}"
        time.sleep(every)


@contextmanager
def pages(dev: DagsterDev, screenshot: Path) -> Iterator[Pages]:
    """The pages of a `dagster dev`. Where a test fails in them, its error says what was seen, and what `dagster dev` printed."""
    with chromium() as browser:
        page = browser.new_page(viewport={"width": 2200, "height": 1100})  # the whole graph fits beside the panel of a selection
        page.set_default_timeout(STEP_SECONDS * 1000)
        expect.set_options(timeout=STEP_SECONDS * 1000)
        try:
            yield Pages(page, dev)
        except BaseException as error:
            page.screenshot(path=screenshot)
            seen = page.locator("body").inner_text()
            error.add_note(f"{page.url} looked as in {screenshot}\n{seen}\ndagster dev:\n{dev.tail()}")
            raise


@contextmanager
def chromium() -> Iterator[Browser]:
    """A headless Chromium of the system, to which no host but 127.0.0.1 is known."""
    found = shutil.which("chromium")
    if found is None:
        pytest.fail("there is no Chromium for the tests of Dagster's pages: install it (apt-get install chromium)")
    arguments = ["--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1"]
    arguments += ["--no-sandbox"] if os.getuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=arguments)
        try:
            yield browser
        finally:
            browser.close()


class Pages:
    """What a person does in the pages, and what is seen there.

    What takes long is waited for with no page open, by asking the webserver: to draw a page that changes takes a core.
    """

    def __init__(self, page: Page, dev: DagsterDev) -> None:
        self.page = page
        self._dev = dev

    def open(self, path: str) -> None:
        self.page.goto(f"{self._dev.url}/{path}", wait_until="domcontentloaded")

    def _wait_outside(self, what: str, holds: Callable[[], bool]) -> None:
        self.page.goto("about:blank")
        wait_for(what, holds, self._dev.tail, every=3)

    def open_graph(self) -> None:
        """The graph of the assets that make samples."""
        self.open("locations/hs_assets/asset-groups/extraction/lineage")

    def node(self, asset: str) -> Locator:
        """An asset in the graph."""
        return self.page.locator("foreignObject").filter(has=self.page.locator(f'[data-tooltip="{asset}"]'))

    def materialize(self, *assets: str, partitions: Sequence[str] | str = (), launched: str = "") -> None:
        """Select assets in the graph, and materialise them.

        Arguments:
            partitions: their keys, or a choice of the dialog's, such as ``Failed and missing``; () where there are none.
            launched: what the dialog says it is about to do, such as ``2 partitions``.
        """
        for asset in assets:
            self.node(asset).locator(f'[data-tooltip="{asset}"]').click(modifiers=["Shift"])
        self.page.get_by_role("button", name="Materialize selected").first.click()
        if not partitions:
            expect(self.page.get_by_text("Launched run")).to_be_visible()
            return
        dialog = self.page.get_by_role("dialog")
        if isinstance(partitions, str):
            dialog.get_by_role("button", name=partitions, exact=True).click()
        else:
            dialog.get_by_text("Select a partition").click()
            for key in partitions:
                self.page.get_by_role("menuitem").filter(has_text=key).click()
            dialog.get_by_text("Partition selection").click()
        expect(dialog.get_by_text(launched, exact=True)).to_be_visible()
        dialog.get_by_role("button", name=re.compile("Launch")).click()
        expect(dialog).to_be_hidden()

    def see_partitions(self, asset: str, **counts: int) -> None:
        """Wait until the page of an asset's partitions shows these numbers, such as ``Failed=2``."""

        def came() -> bool:
            return all(counts.get(status, count) == count for status, count in self._dev.partition_stats(asset).items())

        self._wait_outside(f"{asset}: {counts}", came)
        self.open(f"assets/{asset}?view=partitions")
        for status, count in counts.items():
            expect(self.page.get_by_text(re.compile(rf"^{status} \(\d+\)$"))).to_have_text(f"{status} ({count})")

    def see_metadata(self, asset: str, values: dict[str, str]) -> None:
        """Wait until an asset's page shows these values of its latest materialisation."""
        self.open(f"assets/{asset}")
        for label, value in values.items():
            row = self.page.get_by_role("row").filter(has=self.page.get_by_text(label, exact=True))
            expect(row).to_contain_text(value, timeout=SECONDS * 1000)

    def see_synced(self, asset: str, partitions: Sequence[str], synced: bool) -> None:
        """Wait until the pages of partitions say, or do not say, that they are unsynced with what they were made from."""
        what = f"{'synced' if synced else 'unsynced'} {', '.join(partitions)}"
        wanted = ["FRESH" if synced else "STALE"] * len(partitions)
        self._wait_outside(what, lambda: self._dev.stale(asset, partitions) == wanted)
        wait_for(what, lambda: all(self._is_synced(asset, one) is synced for one in partitions), self._dev.tail)

    def _is_synced(self, asset: str, partition: str) -> bool:
        self.open(f"assets/{asset}?view=partitions")
        with self.page.expect_response(lambda response: "AssetPartitionStaleQuery" in (response.request.post_data or "")):
            self.page.get_by_text(partition, exact=True).filter(visible=True).first.click()
        self.page.wait_for_load_state("networkidle")
        expect(self.page.get_by_text("Materialized", exact=True)).to_be_visible()
        return self.page.get_by_text(re.compile(r"^Unsynced")).count() == 0

    def start_schedule(self, name: str) -> None:
        """Switch a schedule on, in its page."""
        self.open(f"locations/hs_assets/schedules/{name}")
        running = self.page.get_by_role("row").filter(has=self.page.get_by_text("Running", exact=True))
        with self.page.expect_response(lambda response: "StartThisSchedule" in (response.request.post_data or "")):
            running.locator("label").click()
        expect(running.get_by_role("checkbox")).to_be_checked()
