"""A store to look at in a browser, live: all runs, and the report's page of each while it is at work.

| module | content |
|---|---|
| `reader.py` | the runs of a store, read a little at a time |
| `contents.py` | the contents of a run's page, kept up to date |
| `app.py` | the answers to a browser, and who may ask |
| `actions.py` | what a person decides: cancel, fork, approve, reject |
| `gpus.py` | memory and work of this machine's GPUs |
| `serving.py` | the server, alone or below `cairn up` |

A page asks for news every 0.4 s while it is in view. The store is read only then: without a viewer the board costs
nothing. Runs at work and runs in view are looked at each time, the others in turn.
"""
