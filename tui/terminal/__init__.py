"""The terminal below the screens: driver, characters, colors, clipboard, and the base of the app."""
