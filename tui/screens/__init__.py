"""The Textual screens that `tui.app` pushes."""
