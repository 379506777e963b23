"""A live view at the bottom of a terminal whose size may change: rich's `Live`, started again in a
clean screen when the size is another one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import IO

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.control import Control
from rich.live import Live
from rich.segment import Segment

from kdist.terminal import visible

_MAX_RECENT = 200  # lines above the view that are printed again in another size


class _Visible:
    """What is drawn, with control characters of its texts made visible. A line that becomes too
    long by that is cut, so that it stays one line.
    """

    def __init__(self, renderable: RenderableType) -> None:
        self._renderable = renderable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in console.render_lines(self._renderable, options, pad=False):
            shown = [
                segment
                if segment.control
                else segment._replace(text=visible(segment.text, keep="\t"))
                for segment in line
            ]
            if Segment.get_line_length(shown) > options.max_width:
                shown = Segment.adjust_line_length(shown, options.max_width)
            yield from shown
            yield Segment.line()


class Drawing:
    """Draws a view, and prints above it, in the thread of the caller and only when it asks for it.

    Terminals differ in what they do with a drawn frame when they become narrower: some break its
    lines, some cut them. So rich's count of the lines to erase is wrong then, and the screen is
    cleared instead; what was printed last above the view is printed again.
    """

    def __init__(self, stream: Callable[[], IO[str] | None]) -> None:
        """Begin, without drawing yet. `stream` returns the stream to draw on; None for stderr."""
        self._stream = stream
        self._recent: deque[RenderableType] = deque(maxlen=_MAX_RECENT)
        self._frame: RenderableType = ""
        self._live = self._begin()

    def update(self, renderable: RenderableType) -> None:
        renderable = _Visible(renderable)
        self._frame = renderable
        self._follow_size()
        self._live.update(renderable, refresh=True)

    def print(self, renderable: RenderableType) -> None:
        renderable = _Visible(renderable)
        self._follow_size()
        self._recent.append(renderable)
        self._live.console.print(renderable)

    def close(self) -> None:
        """Erase the view and show the cursor."""
        self._follow_size()
        self._live.stop()

    def _begin(self) -> Live:
        console = Console(stderr=True, file=self._stream())
        live = Live(
            console=console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._size = console.size
        live.start()
        return live

    def _follow_size(self) -> None:
        console = self._live.console
        if console.size == self._size:
            return
        console.clear_live()
        console.pop_render_hook()
        console.control(Control.home(), Control.clear())
        height = len(console.render_lines(self._frame))
        for line in list(self._recent)[-max(1, console.size.height - height) :]:
            console.print(line)
        self._live = self._begin()
