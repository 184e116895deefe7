"""Runs: all runs of the home, notes on them, and the history of one command. The page needs no chosen run."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pandas as pd
import streamlit as st

from app import pages
from app.blocks import Note, Table, draw
from app.figures.history import trend
from app.format import byte_axis, first_line, plain
from app.runtime.drawing import viewer_zone
from app.runtime.visitors import may_edit, runs_or_reason
from app.theme import Theme, theme_of
from collector import report
from collector.store import Edit, Run, annotate
from collector.store.prune import delete_runs
from collector.units import MISSING, counted, duration
from training_harness.layout import home_path

QUESTION = "What changed from run to run?"
#: Most runs that can be compared: the chosen one and others.
MAX_COMPARED = 4
#: Height of the table in pixels: a header and ten rows.
_TABLE_HEIGHT = 400
_ALL = "all commands"
#: Keys of the session's state: the facts that the form shows, and what to say after a change.
_SHOWN, _SAID = "tidegauge-runs-form", "tidegauge-runs-said"
_READ_ONLY = (
    "This dashboard only shows runs, since others may reach it. On the machine that holds them, `tidegauge tag` "
    "edits and `tidegauge prune` deletes; docs/sharing.md says how to admit editors."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The facts of a run that the form shows, and that an editor may change."""

    name: str
    tags: str
    note: str
    is_pinned: bool


def show() -> None:
    """Draw the page."""
    st.header(QUESTION, anchor=False)
    runs = runs_or_reason(home_path())
    if not runs:
        return
    if said := st.session_state.pop(_SAID, None):
        st.toast(plain(said))
    by_id = {run.run_id: run for run in runs}
    entries = [report.list_entry(run) for run in runs]
    commands = report.commands_of(entries)
    with st.container(horizontal=True, vertical_alignment="bottom"):
        words = st.text_input(
            "Search",
            placeholder="name, tag, command, status, finding, commit …",
            icon=":material/search:",
            key="search",
            bind="query-params",
            width=420,
        )
        command = _pick_command(commands)
        with_trials = _pick_trials(entries)
    shown = search([entry for entry in entries if with_trials or not entry.is_trial], words, command)
    chosen = _pick_runs(shown)
    if not shown:
        st.caption(":material/info: No run matches the search.")
    _draw_actions(chosen, shown, by_id)
    if command is None:
        command = next((entry.command for entry in [*chosen, *shown] if entry.command.text), None)
    if command is not None:
        _draw_history(command, commands[command], by_id)


def search(
    entries: Sequence[report.ListEntry], words: str, command: report.Command | None
) -> list[report.ListEntry]:
    """Return the runs of a command (None: of all) whose texts contain every word. Pure."""
    wanted = words.lower().split()
    return [
        entry
        for entry in entries
        if (command is None or entry.command == command) and all(word in _text(entry) for word in wanted)
    ]


def _text(entry: report.ListEntry) -> str:
    findings = [finding.kind for finding in entry.result.findings] if entry.result else []
    parts = [
        entry.run_id,
        entry.name,
        entry.status,
        entry.note,
        entry.command.text,
        entry.commit or "",
        entry.gravest or "",
        "pinned" if entry.is_pinned else "",
        tag_text(entry.tags),
        *findings,
    ]
    return "\n".join(parts).lower()


def tag_text(tags: Mapping[str, str]) -> str:
    """Return tags as they are typed: `lr=0.1, change=workers`."""
    return ", ".join(f"{key}={value}" for key, value in tags.items())


def parse_tags(text: str) -> dict[str, str]:
    """Return the tags in a text like `lr=0.1, change=workers`.

    Raises:
        ValueError: a part is no KEY=VALUE.
    """
    tags = {}
    for part in filter(None, map(str.strip, text.split(","))):
        key, equals, value = part.partition("=")
        if not key.strip() or not equals:
            raise ValueError(f"{part!r} is not of the form KEY=VALUE; separate tags with commas")
        tags[key.strip()] = value.strip()
    return tags


def edit_between(shown: Facts, entered: Facts) -> Edit:
    """Return the change that turns the facts that a form showed into those entered; the rest stays as it is.

    Raises:
        ValueError: a tag is no KEY=VALUE.
    """
    before, after = parse_tags(shown.tags), parse_tags(entered.tags)
    return Edit(
        name=entered.name if entered.name != shown.name else None,
        add={key: value for key, value in after.items() if before.get(key) != value},
        remove=frozenset(before.keys() - after.keys()),
        note=entered.note if entered.note != shown.note else None,
        is_pinned=entered.is_pinned if entered.is_pinned != shown.is_pinned else None,
    )


def run_rows(entries: Sequence[report.ListEntry], zone: Any) -> pd.DataFrame:
    """Return one row per run. Figures stay numbers, so that the table sorts by them. Pure."""
    results, scale = [entry.result for entry in entries], memory_unit(entries)[0]
    columns: dict[str, Any] = {
        "Run": [entry.name or entry.run_id for entry in entries],
        "Gravest finding": [entry.gravest or MISSING for entry in entries],
        "Status": [entry.status for entry in entries],
        "Started": pd.to_datetime([entry.started_seconds or math.nan for entry in entries], unit="s", utc=True)
        .tz_convert(zone)
        .tz_localize(None),
        "Memory": [[value / scale for value in result.memory_bytes] if result else [] for result in results],
        "Peak": [_scaled(result.host_peak_bytes, scale) if result else None for result in results],
        "GPU peak": [_scaled(result.device_peak_bytes, scale) if result else None for result in results],
    }
    units = dict.fromkeys(result.throughput_unit for result in results if result and result.throughput)
    for unit in units or ("samples/second",):
        columns[unit.replace("/second", "/s").capitalize()] = [
            result.throughput if result and result.throughput_unit == unit else None for result in results
        ]
    columns |= {
        "Data wait": [_scaled(result.data_wait_ratio, 0.01) if result else None for result in results],
        "Steps": [result.steps if result else None for result in results],
        "Duration": [duration(result.duration_seconds) if result else MISSING for result in results],
        "Tags": [tag_text(entry.tags) for entry in entries],
        "Note": [entry.note for entry in entries],
        "Pinned": [entry.is_pinned for entry in entries],
        "Commit": [f"{(entry.commit or '')[:7]}{' *' if entry.is_dirty else ''}" for entry in entries],
        "Command": [entry.command.text for entry in entries],
        "Id": [entry.run_id for entry in entries],
    }
    table = pd.DataFrame(columns)
    numbers = [name for name in table.columns if name in ("Peak", "GPU peak", "Data wait", "Steps") or "/s" in name]
    table[numbers] = table[numbers].astype(float)
    optional = ("GPU peak", "Tags", "Note", "Pinned", "Commit")
    return table.drop(
        columns=[name for name in optional if (table[name].isna() | table[name].isin(["", False])).all()]
    )


def memory_unit(entries: Sequence[report.ListEntry]) -> tuple[int, str]:
    """Return the unit of the peaks, in bytes and in words: MiB up to 10 GiB."""
    results = [entry.result for entry in entries if entry.result]
    largest = max((max(r.host_peak_bytes or 0, r.device_peak_bytes or 0) for r in results), default=0)
    return byte_axis(largest / 10)


def _scaled(value: float | None, unit: float) -> float | None:
    return None if value is None else value / unit


def _pick_command(commands: Mapping[report.Command, Sequence[report.ListEntry]]) -> report.Command | None:
    words: dict[str, report.Command] = {}
    for command in commands:
        text = command.text if command.text not in words else f"{command.text} (in {command.folder})"
        words[text] = command
    chosen = st.selectbox("Command", [_ALL, *words], key="command", bind="query-params", width=420)
    return words.get(str(chosen))


def _pick_trials(entries: Sequence[report.ListEntry]) -> bool:
    """Return True if the table has the trials of `tidegauge tune` too, as where nothing else ran."""
    count = sum(entry.is_trial for entry in entries)
    if not count:
        return False
    words = f"Trials of `tidegauge tune` ({count})"
    return st.toggle(words, value=count == len(entries), key="trials", bind="query-params")


def _pick_runs(shown: Sequence[report.ListEntry]) -> list[report.ListEntry]:
    """Draw the table and return the runs that are chosen in it."""
    if not shown:
        return []
    config = st.column_config
    table = run_rows(shown, viewer_zone())
    unit = memory_unit(shown)[1]
    peak_format = f"%.{2 if unit == 'GiB' else 0}f {unit}"
    rates = {name: config.NumberColumn(format="%.3g", width=90) for name in table.columns if "/s" in name}
    event: Any = st.dataframe(
        table,
        hide_index=True,
        height=_TABLE_HEIGHT if len(shown) > 10 else "content",
        placeholder=MISSING,
        key=f"runs-{hash(tuple(entry.run_id for entry in shown))}",
        on_select="rerun",
        selection_mode="multi-row",
        alt="All runs: status, gravest finding, memory, throughput, data wait, tags and commit of each.",
        column_config={
            "Run": config.TextColumn(pinned=True, width=150),
            "Started": config.DatetimeColumn(format="YYYY-MM-DD HH:mm", width=125),
            "Status": config.TextColumn(width=75),
            "Gravest finding": config.TextColumn(width=200),
            "Memory": config.LineChartColumn(
                width=110, help="PSS of the training's processes together, from the start to the end of the run"
            ),
            "Peak": config.NumberColumn(
                format=peak_format, width=85, help="Highest PSS of the training's processes"
            ),
            "GPU peak": config.NumberColumn(
                format=peak_format, width=85, help="Most memory that PyTorch's allocator reserved on a device"
            ),
            **rates,
            "Data wait": config.NumberColumn(format="%.0f%%", width=80),
            "Steps": config.NumberColumn(format="localized", width=70),
            "Duration": config.TextColumn(width=100),
            "Pinned": config.CheckboxColumn(width=65, help="A pinned run is never deleted"),
            "Tags": config.TextColumn(width=130),
            "Note": config.TextColumn(width=160),
            "Commit": config.TextColumn(width=90, help="*: files differed from the commit"),
            "Command": config.TextColumn(width=260),
        },
    )
    places = [place for place in event.selection.rows if place < len(shown)]
    return [shown[place] for place in places]


def _draw_actions(
    chosen: Sequence[report.ListEntry], shown: Sequence[report.ListEntry], by_id: Mapping[str, Run]
) -> None:
    """Draw what can be done with the chosen runs."""
    if not chosen:
        st.caption(":material/info: Choose a run to open, name or delete it, or two to four to compare them.")
        if any(entry.status == "ended" for entry in shown):
            st.caption(f":material/info: A run with {MISSING} has no verdict yet; `tidegauge report RUN` makes it.")
        return
    newest, *others = sorted(chosen, key=lambda entry: -entry.started_seconds)
    is_editor = may_edit()
    with st.container(horizontal=True, vertical_alignment="center"):
        st.page_link(
            pages.OVERVIEW.file,
            label=f"Open {newest.name or newest.run_id}",
            icon=pages.OVERVIEW.icon,
            query_params={"run": newest.run_id},
        )
        if others and len(chosen) <= MAX_COMPARED:
            st.page_link(
                pages.COMPARE.file,
                label=f"Compare {len(chosen)} runs",
                icon=pages.COMPARE.icon,
                query_params={"run": newest.run_id, "compare": [entry.run_id for entry in reversed(others)]},
            )
        if is_editor:
            _draw_deletion(chosen, by_id)
    if not others and newest.result is None and newest.status != "running":
        command = "collect" if newest.status == "abandoned" else "report"
        note = Note(
            "This run has no verdict yet. To judge it:", command=f"tidegauge {command} {shlex.quote(newest.run_id)}"
        )
        draw(note, key="no-verdict")
    if not is_editor:
        st.caption(f":material/lock: {plain(_READ_ONLY)}")
    elif not others:
        _draw_form(newest, by_id[newest.run_id])


def _draw_deletion(chosen: Sequence[report.ListEntry], by_id: Mapping[str, Run]) -> None:
    """Draw the button that deletes the chosen runs after a second press; pinned and running ones stay."""
    staying = [entry.run_id for entry in chosen if entry.is_pinned or entry.status == "running"]
    going = [entry for entry in chosen if entry.run_id not in staying]
    words = counted(len(going), "run")
    with st.popover("Delete", icon=":material/delete:", disabled=not going):
        st.markdown(plain(f"Delete {words} and all their records: {', '.join(entry.run_id for entry in going)}?"))
        if any(by_id[entry.run_id].is_shared for entry in going):
            st.markdown("Runs of the shared store go for all nodes.")
        if staying:
            st.caption(plain(f"Pinned and running runs stay: {', '.join(staying)}."))
        if st.button(f"Delete {words} for good", type="primary", key="delete-for-good"):
            _delete([by_id[entry.run_id] for entry in going])
    if staying and not going:
        st.caption("A pinned or running run is not deleted.")


def _delete(runs: Sequence[Run]) -> None:
    with _errors_on_page():
        if reasons := delete_runs(home_path(), runs):
            st.warning(plain("; ".join(f"{run.run_id} stays: {reason}" for run, reason in reasons.items())))
        else:
            st.session_state[_SAID] = f"Deleted {', '.join(run.run_id for run in runs)}."
            st.rerun()


@contextmanager
def _errors_on_page() -> Iterator[None]:
    """Show an error as one line."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - the reader needs one line, not a traceback
        st.error(plain(first_line(error)), icon=":material/error:")


def _draw_form(entry: report.ListEntry, run: Run) -> None:
    """Draw the form of a run's name, tags, note and pin.

    Only what differs from the facts that the form showed is changed: another editor may have changed the rest.
    """
    run_id, shown = st.session_state.get(_SHOWN, ("", None))
    if run_id != entry.run_id:
        shown = Facts(name=entry.name, tags=tag_text(entry.tags), note=entry.note, is_pinned=entry.is_pinned)
        st.session_state[_SHOWN] = entry.run_id, shown
    key = f"{entry.run_id}-{hash(shown)}"
    with st.form(f"form-{key}"):
        with st.container(horizontal=True, vertical_alignment="bottom"):
            name = st.text_input("Name", shown.name, key=f"name-{key}", width=260)
            tags = st.text_input(
                "Tags", shown.tags, key=f"tags-{key}", width=320, help="KEY=VALUE, separated by commas"
            )
            is_pinned = st.checkbox("Pinned: never deleted", shown.is_pinned, key=f"pin-{key}")
        note = st.text_area("Note", shown.note, key=f"note-{key}", height=80)
        is_saved = st.form_submit_button("Save", icon=":material/save:")
    if not is_saved:
        return
    with _errors_on_page():
        annotate(run, edit_between(shown, Facts(name=name.strip(), tags=tags, note=note, is_pinned=is_pinned)))
        del st.session_state[_SHOWN]
        st.session_state[_SAID] = "Saved."
        st.rerun()


def _draw_history(command: report.Command, entries: Sequence[report.ListEntry], by_id: Mapping[str, Run]) -> None:
    """Draw how the figures and findings of one command change over its runs."""
    history = report.history_of(command, entries)
    st.subheader(plain(f"Runs of `{history.command.text}`"), anchor=False)
    folder = f"in {history.command.folder}" if history.command.folder else ""
    parts = f"{len(history.runs)} of " if len(history.runs) < len(entries) else ""
    count = f"{parts}{counted(len(entries), 'run')}"
    left_out = f"left out: {', '.join(history.left_out)}" if history.left_out else ""
    st.caption(plain(" · ".join(filter(None, [count, history.machine, folder, left_out]))))
    sentences = report.change_sentences(history)
    for sentence in sentences:
        st.markdown(f":material/flag: **{plain(sentence)}**")
    if not sentences:
        too_few = "Too few runs to tell a change from chance: four are needed, two before it and two after."
        calm = "No figure changed by more than the runs differ among themselves."
        st.markdown(too_few if len(history.runs) < 4 else calm)
    _draw_trends(history, theme_of(st.context.theme.type))
    st.subheader("Findings over the runs", anchor=False)
    findings = report.finding_histories(history, entries)
    if findings or any(entry.result for entry in entries):
        _draw_findings(findings)
    else:
        draw(Note("No run of this command has a verdict yet."), key="no-verdicts")
    if findings and may_edit():
        _draw_ignoring(findings, by_id[entries[0].run_id])


def _draw_trends(history: report.History, theme: Theme) -> None:
    charts = [(each.key, chart) for each in report.TRENDS if (chart := trend(history, each, theme)) is not None]
    for place in range(0, len(charts), 2):
        for column, (key, chart) in zip(st.columns(2), charts[place : place + 2], strict=False):
            with column:
                draw(chart, key=f"trend-{key}")


def _draw_findings(findings: Sequence[report.FindingHistory]) -> None:
    if not findings:
        draw(Note("No run has a finding that needs attention."), key="no-findings")
        return
    rows = {
        "Finding": [str(each.identity) for each in findings],
        "Severity": [each.severity for each in findings],
        "Runs": [f"{each.count} of {each.runs_count}" for each in findings],
        "First": [report.place_words(each.first) if each.first else "the first run" for each in findings],
        "Gone since": [report.place_words(each.gone) if each.gone else MISSING for each in findings],
    }
    if any(each.known for each in findings):
        rows["Known"] = [each.known or MISSING for each in findings]
    caption = "A finding is the same in several runs if its kind, loader, stage, process role and device are."
    draw(Table(frame=pd.DataFrame(rows), caption=caption, download="findings"), key="findings")


def _draw_ignoring(findings: Sequence[report.FindingHistory], run: Run) -> None:
    """Draw how to accept a finding for all runs of the command, or to count it again."""
    with st.expander("Ignore a finding", icon=":material/notifications_off:"):
        st.caption(
            "A known finding stays visible as information, with its reason. It leads no verdict and sends no alert."
        )
        by_words = {str(each.identity): each for each in findings}
        chosen = by_words[str(st.selectbox("Finding", list(by_words), key="ignored-finding"))]
        if chosen.known is not None:
            st.markdown(plain(f"Known: {chosen.known}"))
            if st.button("Count it again", key="count-again"):
                _change_known(run, chosen, None)
            return
        reason = st.text_input("Reason", key="ignored-reason", placeholder="why it is accepted")
        if st.button("Ignore it in runs of this command", key="ignore", disabled=not reason.strip()):
            _change_known(run, chosen, reason.strip())


def _change_known(run: Run, finding: report.FindingHistory, reason: str | None) -> None:
    with _errors_on_page():
        report.change_known(run, [finding.identity], reason)
        st.session_state[_SAID] = f"{finding.identity} is known." if reason else f"{finding.identity} counts again."
        st.rerun()


if __name__ == "__main__":
    show()
