"""Quotas: prompts and tokens are counted, not calls; the day's outlive the process."""

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.server.servers import PacedExecutor, RunningServer, fake_server, wait_until

from quire.core.errors import ConfigError
from quire.core.request import Completion, RequestMetrics, RequestOutput, Status
from quire.server.errors import ApiError
from quire.server.keys import ApiKey, KeyRing, digest_of
from quire.server.quotas import Demand, Quotas, QuotaSaver, RequestLimits
from quire.server.usage_file import FILE_NAME, UsageFile, default_folder

KEY = "k" * 20
NOON = 1_800_014_400.0  # of 2027-01-15, UTC
DAY_S = 86_400.0


class Time:
    """Both clocks, which go on together."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return NOON + self.now


@pytest.fixture
def clock() -> Time:
    return Time()


def quotas_of(clock: Time, folder: Path | None = None) -> Quotas:
    file = None if folder is None else UsageFile(folder)
    limits = RequestLimits(clock.monotonic)
    return Quotas(limits, file, now=clock.monotonic, wall_now=clock.wall)


def key_of(name: str = "a", **fields: Any) -> ApiKey:
    return ApiKey(name, digest_of(name * 20), **fields)


def output(prompt: int, *completions: int, started: bool = True) -> RequestOutput:
    return RequestOutput(
        "r",
        tuple(range(prompt)),
        [Completion(i, token_ids=list(range(count))) for i, count in enumerate(completions)],
        RequestMetrics(0.0, started_at=0.0 if started else None),
        Status.FINISHED,
    )


def refusal(quotas: Quotas, key: ApiKey, demand: Demand) -> ApiError:
    with pytest.raises(ApiError) as caught:
        quotas.admit(key, demand)
    return caught.value


# ---- the minute


def test_a_call_is_booked_with_the_most_it_can_use_and_settled_with_what_it_did(
    clock: Time,
) -> None:
    quotas, key = quotas_of(clock), key_of(tokens_per_minute=1000)
    first = quotas.admit(key, Demand(1, 100, 500))
    error = refusal(quotas, key, Demand(1, 100, 500))
    assert (error.status, error.code) == (429, "rate_limit_exceeded")
    assert "has 400 left; this asks for up to 600" in error.message
    assert error.retry_after_s == pytest.approx(12.0), "200 are missing, at 1000 a minute"
    first.settle([output(100, 20)])
    quotas.admit(key, Demand(1, 100, 500))
    assert quotas.usage_of(key).owed == 120 + 600


def test_what_was_used_flows_off_with_time(clock: Time) -> None:
    quotas, key = quotas_of(clock), key_of(tokens_per_minute=600)
    quotas.admit(key, Demand(1, 600, 0))
    wait_s = refusal(quotas, key, Demand(1, 10, 0)).retry_after_s
    assert wait_s == pytest.approx(1.0)
    clock.now += 0.9
    refusal(quotas, key, Demand(1, 10, 0))
    clock.now += 0.1
    quotas.admit(key, Demand(1, 10, 0))


def test_a_call_larger_than_the_minute_waits_for_a_full_bucket_and_is_owed(clock: Time) -> None:
    quotas, key = quotas_of(clock), key_of(tokens_per_minute=600)
    quotas.admit(key, Demand(1, 100, 0)).settle([output(100)])
    assert refusal(quotas, key, Demand(1, 0, 1200)).retry_after_s == pytest.approx(10.0)
    clock.now += 10
    quotas.admit(key, Demand(1, 0, 1200)).settle([output(0, 1200)])
    error = refusal(quotas, key, Demand(1, 0, 60))
    assert error.retry_after_s == pytest.approx(66.0), "600 too many, and 60 to come"


def test_keys_do_not_share_quotas(clock: Time) -> None:
    quotas = quotas_of(clock)
    quotas.admit(key_of("a", tokens_per_minute=100), Demand(1, 100, 0))
    quotas.admit(key_of("b", tokens_per_minute=100), Demand(1, 100, 0))
    quotas.admit(key_of("c"), Demand(1, 10**9, 10**9))
    quotas.admit(None, Demand(1, 10**9, 10**9))


def test_what_never_started_costs_nothing(clock: Time) -> None:
    quotas, key = quotas_of(clock), key_of(tokens_per_minute=1000)
    quotas.admit(key, Demand(1, 500, 500)).settle([])
    quotas.admit(key, Demand(2, 500, 500)).settle([output(250, 0, started=False)] * 2)
    assert quotas.usage_of(key).owed == 0
    quotas.admit(key, Demand(1, 500, 500))


def test_every_completion_counts_and_a_prompt_once(clock: Time) -> None:
    quotas, key = quotas_of(clock), key_of()
    quotas.admit(key, Demand(2, 30, 80)).settle([output(10, 5, 5), output(20, 7, 0)])
    usage = quotas.usage_of(key)
    assert (usage.prompt_tokens, usage.completion_tokens, usage.today) == (30, 17, 47)


def test_a_changed_quota_keeps_what_was_used(clock: Time) -> None:
    quotas, key = quotas_of(clock), key_of(tokens_per_minute=1000, tokens_per_day=10_000)
    quotas.admit(key, Demand(1, 900, 0)).settle([output(900)])
    smaller = replace(key, tokens_per_minute=500, tokens_per_day=1000)
    assert refusal(quotas, smaller, Demand(1, 101, 0)).code == "insufficient_quota"
    error = refusal(quotas, smaller, Demand(1, 100, 0))
    assert error.retry_after_s == pytest.approx(60.0), "900 + 100 - 500, at 500 a minute"
    larger = replace(key, tokens_per_minute=2000)
    quotas.admit(larger, Demand(1, 1100, 0))


# ---- prompts


def test_a_body_of_many_prompts_counts_as_many(clock: Time) -> None:
    limits = RequestLimits(clock.monotonic)
    key = key_of(requests_per_minute=600)  # a hundred at once
    limits.enter(key)
    limits.count_prompts(key, 256)
    with pytest.raises(ApiError, match="600 prompts a minute") as caught:
        limits.enter(key)
    assert caught.value.retry_after_s == pytest.approx(15.7), "156 too many, and the next one"
    clock.now += 15.8
    limits.enter(key)


def test_bodies_that_came_in_together_do_not_overdraw_together(clock: Time) -> None:
    limits = RequestLimits(clock.monotonic)
    key = key_of(requests_per_minute=600)
    for _ in range(10):
        limits.enter(key)
    limits.count_prompts(key, 256)
    for _ in range(9):
        with pytest.raises(ApiError, match="prompts a minute"):
            limits.count_prompts(key, 256)


# ---- the day


def test_a_day_is_never_overdrawn_and_ends_at_midnight(clock: Time) -> None:
    quotas, key = quotas_of(clock), key_of(tokens_per_day=1000)
    quotas.admit(key, Demand(1, 400, 200)).settle([output(400, 150)])
    error = refusal(quotas, key, Demand(1, 400, 51))
    assert (error.status, error.code) == (429, "insufficient_quota")
    assert "has 450 left until midnight UTC" in error.message
    assert error.retry_after_s == pytest.approx(DAY_S / 2)
    quotas.admit(key, Demand(1, 400, 50))
    clock.now = DAY_S / 2
    quotas.admit(key, Demand(1, 1000, 0))


def test_what_no_day_could_bear_is_not_to_be_tried_again(clock: Time) -> None:
    error = refusal(quotas_of(clock), key_of(tokens_per_day=1000), Demand(1, 1, 1000))
    assert (error.status, error.code, error.param) == (400, "request_exceeds_quota", "max_tokens")
    assert error.retry_after_s is None


def test_what_ends_after_midnight_takes_nothing_off_the_new_day(clock: Time) -> None:
    quotas, key = quotas_of(clock), key_of(tokens_per_day=1000)
    late = quotas.admit(key, Demand(1, 0, 1000))
    clock.now = DAY_S / 2 + 1
    quotas.admit(key, Demand(1, 300, 0)).settle([output(300)])
    late.settle([output(0, 10)])
    assert quotas.usage_of(key).today == 300


def test_the_day_outlives_the_process(clock: Time, tmp_path: Path) -> None:
    key = key_of(tokens_per_day=1000)
    first = opened(clock, tmp_path, key)
    first.admit(key, Demand(1, 600, 300)).settle([output(600, 100)])
    first.save()
    second = opened(clock, tmp_path, key)
    assert second.usage_of(key).today == 700
    refusal(second, key, Demand(1, 301, 0))
    clock.now += DAY_S
    assert opened(clock, tmp_path, key).usage_of(key).today == 0


def test_what_runs_when_the_process_is_killed_counts_in_full(clock: Time, tmp_path: Path) -> None:
    key = key_of(tokens_per_day=1000)
    killed = opened(clock, tmp_path, key)
    killed.admit(key, Demand(1, 100, 300))
    killed.save()
    assert opened(clock, tmp_path, key).usage_of(key).today == 400


def test_two_processes_share_a_day(clock: Time, tmp_path: Path) -> None:
    key = key_of(tokens_per_day=1000)
    one, other = opened(clock, tmp_path, key), opened(clock, tmp_path, key)
    running = one.admit(key, Demand(1, 0, 800))
    one.save()
    other.admit(key, Demand(1, 100, 0)).settle([output(100)])
    other.save()
    assert other.usage_of(key).today == 900
    refusal(other, key, Demand(1, 200, 0))
    running.settle([output(0, 300)])
    one.save()
    assert one.usage_of(key).today == 400
    other.save()  # it has nothing new, but it refused somebody
    other.admit(key, Demand(1, 600, 0))


def test_saving_again_adds_nothing(clock: Time, tmp_path: Path) -> None:
    key = key_of(tokens_per_day=1000)
    quotas = opened(clock, tmp_path, key)
    quotas.admit(key, Demand(1, 70, 0)).settle([output(70)])
    for _ in range(3):
        quotas.save()
    assert json.loads((tmp_path / FILE_NAME).read_text())["used"] == {"a": 70}
    assert (tmp_path / FILE_NAME).stat().st_mode & 0o777 == 0o600


def test_many_at_once_lose_no_token(clock: Time, tmp_path: Path) -> None:
    key = key_of(tokens_per_day=10**9)
    many = [opened(clock, tmp_path, key) for _ in range(4)]

    def work(quotas: Quotas) -> None:
        for _ in range(10):
            quotas.admit(key, Demand(1, 5, 5)).settle([output(5, 2)])
            quotas.save()

    threads = [threading.Thread(target=work, args=[quotas]) for quotas in many]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for quotas in many:
        quotas.save()
    assert json.loads((tmp_path / FILE_NAME).read_text())["used"] == {"a": 4 * 10 * 7}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b"null",
        b"[" * 100_000,
        b'{"version": 1, "day": 5, "used": {}}',
        b'{"version": 1, "day": "2027-01-15", "used": [1]}',
        b'{"version": 1, "day": "2027-01-15", "used": {"a": -1}}',
        b'{"version": 1, "day": "2027-01-15", "used": {"a": true}}',
        b'{"version": 1, "day": "2027-01-15", "used": {"a": 1e400}}',
        b'{"version": 1, "day": "2027-01-15", "used": {"a": "many"}}',
    ],
)
def test_a_broken_file_is_put_aside(
    clock: Time, tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FILE_NAME).write_bytes(content)
    key = key_of(tokens_per_day=1000)
    with caplog.at_level("WARNING", "quire.server"):
        quotas = opened(clock, tmp_path, key)
    assert "quota_state_broken" in caplog.text
    assert (tmp_path / "quotas.broken").read_bytes() == content
    quotas.admit(key, Demand(1, 10, 0))
    quotas.save()
    assert opened(clock, tmp_path, key).usage_of(key).today == 10


def test_a_folder_that_cannot_be_used_is_said_at_the_start(clock: Time, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match="name another folder by --state"):
            opened(clock, folder, key_of(tokens_per_day=1))
        opened(clock, folder, key_of(tokens_per_minute=1))  # which keeps nothing
    with pytest.raises(ConfigError, match="give --state"):
        quotas_of(clock).open(KeyRing([key_of(tokens_per_day=1)]))


def test_a_disk_that_fails_is_tried_again(
    clock: Time, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key = key_of(tokens_per_day=1000)
    quotas = opened(clock, tmp_path / "state", key)
    quotas.admit(key, Demand(1, 10, 0)).settle([output(10)])
    (tmp_path / "state").rename(tmp_path / "away")
    with caplog.at_level("INFO", "quire.server"):
        quotas.save()
        quotas.save()
        assert caplog.text.count("quota_state_unsaved") == 1, "reported once"
        refusal(quotas, key, Demand(1, 991, 0))
        (tmp_path / "away").rename(tmp_path / "state")
        quotas.save()
    assert "quota_state_saved" in caplog.text
    assert opened(clock, tmp_path / "state", key).usage_of(key).today == 10


def test_a_link_in_the_place_of_the_file_is_not_followed(clock: Time, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    folder = tmp_path / "state"
    folder.mkdir()
    (folder / "quotas.new").symlink_to(victim)
    with pytest.raises(ConfigError):
        opened(clock, folder, key_of(tokens_per_day=1))
    assert victim.read_text() == "untouched"


def test_the_last_figures_are_saved_at_the_end(clock: Time, tmp_path: Path) -> None:
    key = key_of(tokens_per_day=1000)
    quotas = opened(clock, tmp_path, key)
    saver = QuotaSaver(quotas, interval_s=3600)
    quotas.admit(key, Demand(1, 10, 0)).settle([output(10)])
    saver.close()
    assert opened(clock, tmp_path, key).usage_of(key).today == 10


def test_state_lies_where_the_system_says() -> None:
    assert default_folder({"STATE_DIRECTORY": "/var/lib/quire:/x"}) == Path("/var/lib/quire")
    assert default_folder({"XDG_STATE_HOME": "/home/a/.s"}) == Path("/home/a/.s/quire")
    found = default_folder({})
    assert found is not None
    assert found.parts[-3:] == (".local", "state", "quire")


def opened(clock: Time, folder: Path, key: ApiKey) -> Quotas:
    quotas = quotas_of(clock, folder)
    quotas.open(KeyRing([key]))
    return quotas


# ---- a server


@pytest.fixture
def server(text_model: Path, tmp_path: Path) -> Iterator[RunningServer]:
    key = ApiKey("one", digest_of(KEY), tokens_per_minute=300, tokens_per_day=2000)
    executor = PacedExecutor(num_blocks=1024)
    with fake_server(text_model, executor, keys=KeyRing([key]), state_folder=tmp_path) as made:
        made.headers["Authorization"] = f"Bearer {KEY}"
        yield made


def ask(server: RunningServer, prompts: int = 1, **fields: Any) -> Any:
    body = {"prompt": [[1, 2, 3, 4]] * prompts, "max_tokens": 6, "ignore_eos": True, **fields}
    return server.post("/v1/completions", body)


def test_tokens_are_counted_not_calls(server: RunningServer) -> None:
    reply = ask(server, prompts=3, n=2)
    assert reply.status == 200
    assert reply.headers["x-ratelimit-limit-tokens"] == "300"
    assert int(reply.headers["x-ratelimit-remaining-tokens"]) >= 300 - 3 * (4 + 12)
    assert reply.headers["x-ratelimit-reset-tokens"].endswith("ms")
    [key] = server.service.settings.keys
    wait_until(lambda: server.service.quotas.usage_of(key).completion_tokens == 36)
    assert server.service.quotas.usage_of(key).today == 48


def test_the_client_is_told_when_to_come_again(server: RunningServer) -> None:
    reply = ask(server, prompts=20, n=8, max_tokens=6)
    assert reply.status == 200, "more than a minute's, from a full bucket"
    with server.client(KEY) as client, pytest.raises(openai.RateLimitError) as caught:
        client.completions.create(model="tiny-text", prompt="hi", max_tokens=3)
    assert caught.value.code == "rate_limit_exceeded"
    assert int(caught.value.response.headers["retry-after"]) > 60
    assert caught.value.response.headers["x-ratelimit-remaining-tokens"] == "0"


def test_the_day_of_a_server_outlives_it(text_model: Path, tmp_path: Path) -> None:
    ring = KeyRing([ApiKey("one", digest_of(KEY), tokens_per_day=2000)])
    for used in (400, 800):
        with fake_server(text_model, keys=ring, state_folder=tmp_path) as server:
            server.headers["Authorization"] = f"Bearer {KEY}"
            assert ask(server, prompts=10, n=6).status == 200
        assert json.loads((tmp_path / FILE_NAME).read_text())["used"] == {"one": used}


def test_a_call_that_was_refused_by_the_engine_costs_nothing(server: RunningServer) -> None:
    assert ask(server, max_tokens=100_000).status == 400
    assert server.post("/v1/completions", {"prompt": [[10**6]], "max_tokens": 4}).status == 400
    assert ask(server).status == 200
    [key] = server.service.settings.keys
    wait_until(lambda: server.service.quotas.usage_of(key).today == 10)


def test_a_body_of_many_prompts_counts_as_many_requests(text_model: Path) -> None:
    ring = KeyRing([ApiKey("one", digest_of(KEY), requests_per_minute=6)])
    with fake_server(text_model, keys=ring) as server:
        server.headers["Authorization"] = f"Bearer {KEY}"
        assert ask(server, prompts=20).status == 200
        reply = ask(server)
    assert (reply.status, reply.error["code"]) == (429, "rate_limit_exceeded")
    assert int(reply.headers["retry-after"]) > 100, "twenty prompts are 200 seconds' worth"
