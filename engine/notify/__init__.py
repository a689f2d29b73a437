"""Send messages about a run through apprise, from a thread of its owner. Training never waits for it.

`engine.launch` starts it (`start`). It follows the journal (`observer`), words the messages (`message`) and sends them
(`sender`) to the URLs (`destinations`). Whoever notices that a run has crashed sends that message (`crashed`).
"""
