"""The colours of every screen, as rich styles: of the palette of Okabe and Ito (Color Universal Design, 2008), which
people who see few colours can tell apart, in the terminal's 256 colours. No meaning hangs on colour alone."""

from __future__ import annotations

BLUE = "color(75)"
ORANGE = "color(214)"
GREEN = "color(36)"
VERMILION = "color(202)"
MUTED = "dim"
STRONG = "bold"

GOOD, WARNING, BAD = GREEN, ORANGE, f"bold {VERMILION}"
NOTICE = "bold reverse"
