"""Findings that are reported, and webhooks that are possible."""

import dataclasses

import pytest

from collector.agent.live.alerts import Alert, command_sender, new_findings, payload, webhook_sender
from collector.agent.live.verdicts import EVERY_SECONDS, pause_seconds
from collector.findings import Evidence, Finding, Locus

EVIDENCE = tuple(Evidence(name=name, value=1, unit="ratio", n=1, window="run") for name in "ab")
SLOW = Finding(
    kind="slow-worker", severity="warning", confidence=0.9, summary="", locus=Locus(worker=1), evidence=EVIDENCE
)


def test_finding_is_sent_when_new_and_when_more_severe():
    other = dataclasses.replace(SLOW, locus=Locus(worker=2))
    graver = dataclasses.replace(SLOW, severity="critical")
    surer = dataclasses.replace(SLOW, confidence=1.0, summary="other words")
    verdicts = [[SLOW], [surer], [], [SLOW, other], [graver, other], [SLOW], [graver]]
    told, heard = {}, []
    for findings in verdicts:
        new, told = new_findings(findings, told)
        heard.append(new)
    assert heard == [[SLOW], [], [], [other], [graver], [], []]


def test_information_is_not_sent_until_it_is_a_warning():
    note = dataclasses.replace(SLOW, severity="info")
    first, told = new_findings([note], {})
    second, _ = new_findings([SLOW], told)
    assert (first, second) == ([], [SLOW])


@pytest.mark.parametrize(
    "url", ["", "example.com/x", "ftp://secret/x", "http:///secret", "http://h:port/secret", "http://h/secret here"]
)
def test_invalid_webhook_is_refused_without_showing_it(url):
    with pytest.raises(ValueError, match=r"not of the form http://HOST\[:PORT\]/PATH") as refused:
        webhook_sender(url)
    assert "secret" not in str(refused.value)


def test_chats_get_a_text_and_others_the_finding():
    alert = Alert(run_id="r1", name="train", finding=dataclasses.replace(SLOW, summary="Worker 1 is slow. " * 200))
    slack, discord = payload(alert, "hooks.slack.com"), payload(alert, "discord.com")
    assert slack["text"].startswith("*train*: slow-worker (warning)\nWorker 1 is slow.")
    assert discord["content"].startswith("**train**: slow-worker (warning)\nWorker 1 is slow.")
    assert len(discord["content"]) == 2000, "Discord refuses longer ones"
    assert "content" in payload(alert, "canary.discord.com")
    assert "finding" in payload(alert, "notdiscord.com")
    other = payload(alert, "example.com")
    assert (other["run"], other["finding"]["kind"]) == ({"run_id": "r1", "name": "train"}, "slow-worker")


def test_slack_shows_angle_brackets_as_they_are():
    alert = Alert(run_id="r1", name="a&b", finding=dataclasses.replace(SLOW, summary="<lambda> waits."))
    assert payload(alert, "hooks.slack.com")["text"] == "*a&amp;b*: slow-worker (warning)\n&lt;lambda&gt; waits."


def test_an_empty_command_is_refused():
    with pytest.raises(ValueError, match="give a shell command"):
        command_sender(" ")


def test_expensive_verdicts_are_made_less_often():
    assert pause_seconds(0.01) == EVERY_SECONDS
    assert pause_seconds(0.9) == pytest.approx(90)
