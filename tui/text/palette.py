"""Rich styles of all screens: the Okabe-Ito palette (Color Universal Design, 2008), safe for color blindness.

The colors are the nearest of the 256 terminal colors. Color never carries meaning alone.
"""

from __future__ import annotations

BLUE = "color(75)"
ORANGE = "color(214)"
GREEN = "color(36)"
VERMILION = "color(202)"
MUTED = "dim"
STRONG = "bold"

GOOD, WARNING, BAD = GREEN, ORANGE, f"bold {VERMILION}"
NOTICE = "bold reverse"
