"""Results of runs for other people: a page of HTML, and figures for papers."""
