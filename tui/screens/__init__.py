"""The Textual screens that `tui.screens.app` pushes."""
