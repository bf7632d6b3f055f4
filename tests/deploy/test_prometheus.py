"""prometheus.yml, alerts.yml and grafana.json against the programs that read them, and a daemon that answers."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_daemon import MODEL, LiveDaemon, eventually, live_daemon
from programs import DEPLOY, free_port, program, replaced, responds, running
from prometheus_client.parser import text_string_to_metric_families

KEY = "a-key"
HEADERS = {"Authorization": f"Bearer {KEY}"}
METRIC = re.compile(r"(?<![:\w])(?:appliance|process)_[a-z_]+[a-z]")


def promtool(*arguments: str | Path, stdin: str | None = None) -> str:
    command = [program("promtool"), *map(str, arguments)]
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def dashboard() -> dict[str, Any]:
    return dict(json.loads((DEPLOY / "grafana.json").read_text()))


def expressions() -> dict[str, str]:
    """Every expression of the dashboard, as Grafana would send it, by the title of its panel and its legend."""
    found = {}
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", []):
            expression = target["expr"].replace("$instance", ".*").replace("$__rate_interval", "1m")
            assert "$" not in expression
            found[f"{panel['title']}: {target['legendFormat']}"] = expression
    return found


@pytest.fixture(scope="module")
def locked(starter_models_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveDaemon]:
    """A daemon with a key that has answered a few requests, one of them wrong."""
    home = tmp_path_factory.mktemp("locked")
    with live_daemon(starter_models_dir, home, api_key=KEY) as daemon:
        complete(daemon)
        complete(daemon)
        assert (
            daemon.post("/v1/completions", {"model": "unknown", "prompt": "a"}, **HEADERS).status_code == 404
        )
        yield daemon


def complete(daemon: LiveDaemon) -> None:
    prompt = "One, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve,"
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "ignore_eos": True}
    assert daemon.post("/v1/completions", body, **HEADERS).status_code == 200


def page(daemon: LiveDaemon) -> str:
    return httpx.get(f"{daemon.url}/metrics", headers=HEADERS).text


def test_rules_and_configuration_are_valid() -> None:
    assert "12 rules found" in promtool("check", "rules", DEPLOY / "alerts.yml")
    assert "prometheus.yml is valid" in promtool("check", "config", DEPLOY / "prometheus.yml")


def test_alerts_fire_when_they_should() -> None:
    assert "SUCCESS" in promtool("test", "rules", Path(__file__).with_name("alerts_test.yml"))


@pytest.mark.starter
def test_names_and_units_follow_the_conventions(locked: LiveDaemon) -> None:
    promtool("check", "metrics", stdin=page(locked))


@pytest.mark.starter
def test_what_alerts_and_dashboard_name_is_there(locked: LiveDaemon) -> None:
    families = text_string_to_metric_families(page(locked))
    live = {sample.name for family in families for sample in family.samples}
    in_alerts = set(METRIC.findall((DEPLOY / "alerts.yml").read_text()))
    in_dashboard = set(METRIC.findall("\n".join(expressions().values())))
    assert len(in_alerts) >= 9
    assert len(in_dashboard) >= 20
    assert in_alerts | in_dashboard <= live


def test_the_dashboard_is_whole() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells)), "panels overlap"
    assert max(x for x, _ in cells) < 24
    for panel in panels:
        if panel["type"] != "row":
            assert panel["description"]
            assert panel["datasource"]["uid"] == "${datasource}"


@pytest.fixture(scope="module")
def prometheus(locked: LiveDaemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a Prometheus that scrapes the daemon, once a second and with its key, by our configuration."""
    home = tmp_path_factory.mktemp("prometheus")
    (home / "key").write_text(KEY)
    (home / "alerts.yml").write_text((DEPLOY / "alerts.yml").read_text())
    config = replaced(
        (DEPLOY / "prometheus.yml").read_text(),
        {
            "127.0.0.1:8000": locked.url.removeprefix("http://"),
            "          - 127.0.0.1:8001\n": "",
            "scrape_interval: 15s": "scrape_interval: 1s",
            "evaluation_interval: 15s": "evaluation_interval: 1s",
            "# authorization:": "authorization:",
            "#   type: Bearer": "  type: Bearer",
            "#   credentials_file: /etc/prometheus/appliance.key": f"  credentials_file: {home / 'key'}",
        },
    )
    (home / "prometheus.yml").write_text(config)
    url = f"http://127.0.0.1:{free_port()}"
    command = [
        program("prometheus"),
        f"--config.file={home / 'prometheus.yml'}",
        f"--storage.tsdb.path={home / 'data'}",
        f"--web.listen-address={url.removeprefix('http://')}",
    ]
    with running(command, home / "log", responds(url)):
        yield url


def query(prometheus: str, expression: str) -> list[dict[str, Any]]:
    answer = httpx.get(f"{prometheus}/api/v1/query", params={"query": expression}).json()
    assert answer["status"] == "success", f"{expression}: {answer}"
    return list(answer["data"]["result"])


@pytest.mark.starter
def test_prometheus_scrapes_a_daemon_with_its_key(prometheus: str) -> None:
    def up() -> list[str]:
        return [series["value"][1] for series in query(prometheus, 'up{job="appliance"}')]

    def rules() -> list[str]:
        groups = httpx.get(f"{prometheus}/api/v1/rules").json()["data"]["groups"]
        return [rule["health"] for group in groups for rule in group["rules"]]

    assert eventually(lambda: up() == ["1"], 10.0), up()
    assert eventually(lambda: rules() == ["ok"] * 12, 10.0), rules()

    def ratio() -> list[float]:
        found = query(prometheus, "instance:appliance_host_memory:used_ratio")
        return [float(series["value"][1]) for series in found]

    assert eventually(lambda: ratio() != [], 10.0)
    assert 0 < ratio()[0] < 1


@pytest.mark.starter
def test_every_panel_of_the_dashboard_shows_something(prometheus: str, locked: LiveDaemon) -> None:
    def scraped() -> int:
        return sum(int(series["value"][1]) for series in query(prometheus, "sum(appliance_requests_total)"))

    assert eventually(lambda: scraped() == 2, 10.0)
    complete(locked)
    assert eventually(lambda: scraped() == 3, 10.0)
    values = {title: query(prometheus, expression) for title, expression in expressions().items()}
    assert [title for title, result in values.items() if not result] == []
    # All quantiles and rates are of requests that were, so none of them is "not a number".
    numbers = {title: [s["value"][1] for s in result] for title, result in values.items()}
    assert [title for title, found in numbers.items() if "NaN" in found] == []
    generated = float(numbers["Throughput: generated tokens/s"][0])
    assert generated > 0
