"""The report for people."""

from __future__ import annotations

from moelab.doctor.check import MISSING, OK, WARN, Check

STYLE = {OK: "green", WARN: "bold yellow", MISSING: "dim"}


def count(checks: list[Check]) -> dict[str, int]:
    return {status: sum(c.status == status for c in checks) for status in STYLE}


def as_table(checks: list[Check]):
    """A rich table: one block per section; a fix stands below its finding, after an arrow."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    totals = count(checks)
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        caption=f"{totals[OK]} ok · {totals[WARN]} to look at · {totals[MISSING]} missing",
        caption_justify="left",
    )
    for column in ("check", "status"):
        table.add_column(column, no_wrap=True)
    table.add_column("finding", overflow="fold")
    section = None
    for check in checks:
        if check.section != section:
            if section is not None:
                table.add_row()
            section = check.section
            table.add_row(Text(section, style="bold"))
        finding = Text(check.detail, style="dim" if check.status == MISSING else "")
        if check.fix:
            finding.append(f"\n→ {check.fix}")
        table.add_row(Text(f"  {check.name}"), Text(check.status, style=STYLE[check.status]), finding)
    return table
