"""Curves as text: axes, downsampling, plotting and export."""
