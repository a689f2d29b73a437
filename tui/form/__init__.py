"""State (`model`) and checks (`checks`) of the form that starts a run, without widgets."""
