"""Send messages about a run through apprise, from a process that outlives the supervisor. Training never waits for it.

`engine.launch.lifecycle` starts the watcher (`start`). It follows the journal (`observer`), words the messages
(`message`) and hands them to short-lived senders (`outbox`, `sender`), which read the URLs (`destinations`).
"""
