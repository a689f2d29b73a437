"""Send messages about a run through apprise, from a thread of its owner. Training never waits for it.

The recorder of a run feeds it (`run_messages`). It words the messages (`message`) and sends them (`sender`). Whoever
notices that a run has crashed starts `run_messages` to send that message.
"""
