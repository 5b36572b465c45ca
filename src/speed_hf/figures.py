# Copyright 2026 The speed_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""Pictures of pipelined decoding. The only module that needs matplotlib."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


try:
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch, Rectangle
    from matplotlib.ticker import MaxNLocator
except ImportError as error:
    raise ImportError("`matplotlib` must be installed for pictures: run `pip install speed-hf[demo]`.") from error


LABELLED_POSITIONS = 45  # with more of them, token texts would be too small to read
CELL, SMALL_CELL = 0.24, 0.15  # inches, edge of a cell with and without texts
LARGEST = (20.0, 15.0)  # inches that all cells together may take across and down; beyond it they shrink
SMALLEST_WIDTH = 6.4  # inches, for the title and the legend
ABOVE, BELOW, BESIDE = 0.85, 1.15, 0.2  # inches around the cells, for title, axis and legend
PROMPT_HEIGHT = 1.6  # cells
CHARACTER = 0.07  # inches, width of most letters at font size 8

INK, FAINT, BAND, FLIP = "#22313f", "#7d8a96", "#f3f5f7", "#d1333d"
COMMITTED: dict[str, Any] = {"marker": "o", "color": "white", "markeredgewidth": 0, "linestyle": "none"}
FLIPPED: dict[str, Any] = {
    "marker": "D",
    "color": FLIP,
    "markeredgecolor": "white",
    "markeredgewidth": 0.7,
    "linestyle": "none",
}
STYLE: Any = {"font.family": "DejaVu Sans", "font.size": 8, "text.color": INK, "hatch.linewidth": 0.6}


@dataclass
class PipelineCell:
    """
    One position in one group pass.

    Args:
        group_pass (`int`): number of the pass, from 1.
        column (`int`): 0-based, prompt included; the last prompt column stands for the whole prompt.
        exit (`int`): exit reached, 1 .. G.
        invalidated (`bool`): whether this work was thrown away later.
        flipped (`bool`): whether this pass changed the position's prediction, so that what follows had to restart.
        stops (`int`): youngest column whose work the flip threw away; `column` where there was none yet.
    """

    group_pass: int
    column: int
    exit: int
    invalidated: bool = False
    flipped: bool = False
    stops: int = 0


def pipeline_cells(
    trace: list[torch.LongTensor], prompt_length: int, num_repetitions: int, sequence: int = 0
) -> list[PipelineCell]:
    """
    What became of the work of every pass on one sequence.

    Work is invalidated where a position starts again at exit 1 later, or vanishes before exit G. What a stop criterion
    leaves in flight looks the same, and counts as invalidated by a flip in the last pass.

    Args:
        trace (`list[torch.LongTensor]` of shapes `(R, 4)`): as in `speed_stats["trace"]`.
        prompt_length (`int`): columns of the prompt, padding included.
        num_repetitions (`int`): G.
        sequence (`int`): 0-based place in the batch.

    Returns:
        `list[PipelineCell]`, pass by pass, columns in order.
    """
    first = prompt_length - 1
    passes: list[dict[int, int]] = []  # column -> exit, of each pass
    for rows in trace:
        own = rows[(rows[:, 0] == sequence) & (rows[:, 1] >= first)]
        passes.append(dict(own[:, 1:3].tolist()))
    while passes and not passes[-1]:
        passes.pop()  # passes that only other sequences of the batch needed
    if not passes:
        raise ValueError(f"`trace` must hold rows of sequence {sequence}, found none: set `speed_trace=True`.")

    cells: dict[tuple[int, int], PipelineCell] = {}
    later: set[int] = set()
    following: dict[int, int] = {}
    for index in reversed(range(len(passes))):
        for column, exit_ in passes[index].items():
            if exit_ == num_repetitions:
                kept = column not in later
            else:
                kept = following.get(column) == exit_ + 1 and not cells[index + 1, column].invalidated
            cells[index, column] = PipelineCell(index + 1, column, exit_, invalidated=not kept)
        later |= passes[index].keys()
        following = passes[index]

    started: set[int] = set()
    for index, (now, after) in enumerate(zip(passes, [*passes[1:], {}])):
        started |= now.keys()
        broken = [column for column, exit_ in now.items() if after.get(column, num_repetitions + 1) != exit_ + 1]
        # A token that ends the text is never started. Where it was only a guess, its flip shows as a late start.
        late = [column for column, exit_ in after.items() if exit_ == 1 and now.get(column - 1, 1) > 1]
        if late == [prompt_length] and prompt_length not in started and now[first] == num_repetitions:
            late = []  # `speed_prompt_overlap=False`: the first new token had to wait
        flipped = cells.get((index, min(broken + late, default=0) - 1))
        if flipped is not None:
            flipped.flipped = True
            flipped.stops = max(broken, default=flipped.column)
    return [cells[key] for key in sorted(cells)]


def pipeline_figure(
    trace: list[torch.LongTensor],
    prompt_length: int,
    num_repetitions: int,
    tokens_as_text: list[str],
    path: str | Path,
    sequence: int = 0,
):
    """
    Draw how one sequence went through the pipeline: group passes to the right, positions downwards, exits as colours.

    Args:
        trace (`list[torch.LongTensor]` of shapes `(R, 4)`): as in `speed_stats["trace"]`.
        prompt_length (`int`): columns of the prompt, padding included.
        num_repetitions (`int`): G.
        tokens_as_text (`list[str]`): all new tokens; shown for up to 45 positions.
        path (`str` or `Path`): the PNG to write.
        sequence (`int`): 0-based place in the batch.
    """
    cells = pipeline_cells(trace, prompt_length, num_repetitions, sequence)
    for cell in cells:  # from here on, row 0 is the prompt and row 1 the first new token
        cell.column -= prompt_length - 1
        cell.stops -= prompt_length - 1
    num_passes, num_rows = cells[-1].group_pass, max(cell.column for cell in cells)
    num_prompt_tokens = int(((trace[0][:, 0] == sequence) & (trace[0][:, 1] < prompt_length)).sum())
    labels = _row_labels(tokens_as_text, num_prompt_tokens, num_rows)
    starts = {cell.column: cell.group_pass for cell in reversed(cells)}

    edge = CELL if num_rows <= LABELLED_POSITIONS else SMALL_CELL
    width, height = min(edge, LARGEST[0] / num_passes), min(edge, LARGEST[1] / (num_rows + PROMPT_HEIGHT))
    left = min(starts[row] - 0.9 - CHARACTER * len(text) / width for row, text in labels.items())
    right = max(num_passes + 0.8, left + SMALLEST_WIDTH / width)
    across, down = (right - left) * width, (num_rows + PROMPT_HEIGHT + 0.3) * height
    page = across + 2 * BESIDE, down + ABOVE + BELOW
    colours = _exit_colours(num_repetitions)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=page)
        axes = figure.add_axes((BESIDE / page[0], BELOW / page[1], across / page[0], down / page[1]))
        axes.set_xlim(left, right)
        axes.set_ylim(num_rows + 0.8, 0.5 - PROMPT_HEIGHT)
        for row in range(2, num_rows + 1, 2):
            axes.axhspan(row - 0.5, row + 0.5, color=BAND, zorder=0)
        for cell in cells:
            _draw_cell(axes, cell, colours, points=72 * min(width, height))
        for row, text in labels.items():
            middle = row or 0.5 - PROMPT_HEIGHT / 2
            axes.text(starts[row] - 0.7, middle, text, ha="right", va="center_baseline", parse_math=False)
        _draw_pass_axis(axes, num_passes)
        _write_title(figure, page[1], len(tokens_as_text), num_passes, num_repetitions)
        _add_legend(figure, colours)
        figure.savefig(path, dpi=160, facecolor="white")


def _row_labels(tokens_as_text, num_prompt_tokens, num_rows):
    labels = {0: f"prompt ({num_prompt_tokens} token{'s' if num_prompt_tokens > 1 else ''})"}
    if num_rows <= LABELLED_POSITIONS:
        # Rows after the text were started on a guess that did not hold.
        texts = [*tokens_as_text, *[""] * num_rows]
        labels |= {row: texts[row - 1] for row in range(1, num_rows + 1)}
    return labels


def _exit_colours(num_repetitions):
    """RGB of exits 1 .. G, pale to dark."""
    colour_map = matplotlib.colormaps["YlGnBu"]
    return [colour_map(0.25 + 0.65 * index / max(num_repetitions - 1, 1))[:3] for index in range(num_repetitions)]


def _invalidated_look(colour):
    """Pale, and hatched in what was the colour: the exit can still be told."""
    pale, strong = [0.2 * part + 0.8 for part in colour], [0.85 * part for part in colour]
    return {"facecolor": pale, "edgecolor": strong, "hatch": "////"}


def _draw_cell(axes, cell, colours, points):
    """`points`: edge of a cell in points."""
    top, height = (cell.column - 0.44, 0.88) if cell.column else (0.56 - PROMPT_HEIGHT, PROMPT_HEIGHT - 0.12)
    middle, edge = top + height / 2, cell.group_pass + 0.5
    colour = colours[cell.exit - 1]
    look = _invalidated_look(colour) if cell.invalidated else {"facecolor": colour}
    axes.add_patch(Rectangle((cell.group_pass - 0.46, top), 0.92, height, linewidth=0, zorder=2, **look))
    if cell.exit == len(colours) and not cell.invalidated:
        axes.plot(cell.group_pass, middle, markersize=0.26 * points, zorder=3, **COMMITTED)
    if cell.flipped:
        axes.plot([edge, edge], [middle, cell.stops + 0.46], color=FLIP, linewidth=0.1 * points, zorder=4)
        axes.plot(edge, middle, markersize=0.36 * points, zorder=5, **FLIPPED)


def _draw_pass_axis(axes, num_passes):
    axes.spines[:].set_visible(False)
    axes.set_yticks([])
    axes.tick_params(length=0, labelcolor=FAINT)
    ticks = MaxNLocator(12, integer=True, steps=[1, 2, 5, 10]).tick_values(1, num_passes)
    axes.set_xticks([1, *(tick for tick in ticks if 1 < tick <= num_passes)])
    where = {"xycoords": axes.get_xaxis_transform(), "textcoords": "offset points", "ha": "center"}
    axes.annotate("group pass", ((1 + num_passes) / 2, 0), (0, -23), color=FAINT, **where)


def _write_title(figure, page_height, num_tokens, num_passes, num_repetitions):
    inches = {"x": BESIDE, "transform": figure.dpi_scale_trans}
    title = f"{num_tokens} tokens in {num_passes} group passes"
    figure.text(y=page_height - 0.4, s=title, size=12, weight="bold", **inches)
    detail = f"{num_passes / num_tokens:.2f} passes per token; plain decoding needs {num_repetitions}"
    figure.text(y=page_height - 0.63, s=detail, size=9, color=FAINT, **inches)


def _add_legend(figure, colours):
    last = Patch(facecolor=colours[-1])
    entries = {f"exit {exit_}": Patch(facecolor=colour) for exit_, colour in enumerate(colours[:-1], start=1)}
    entries[f"exit {len(colours)}, next token committed"] = (last, Line2D([], [], markersize=5, **COMMITTED))
    entries["invalidated later"] = Patch(linewidth=0, **_invalidated_look(colours[len(colours) // 2]))
    entries["flip found: what follows restarts"] = Line2D([], [], markersize=6.5, **FLIPPED)
    figure.legend(
        entries.values(),
        entries.keys(),
        loc="lower left",
        bbox_to_anchor=(BESIDE - 0.08, 0.08),
        bbox_transform=figure.dpi_scale_trans,
        ncols=4,
        frameon=False,
        handlelength=1.3,
        handleheight=1.3,
    )
