"""Credits the answers in a log of another program, and stores them as an experiment that the viewer shows.

| file | contents |
|---|---|
| `commands.py` | the command `treetune credit` |
| `credit_log.py` | the algorithm: each file of the log is read, credited and stored |
| `log.py` | finds the files of a log, and reads the rows of a file as answers |
| `tokens.py` | makes token ids of the texts in a log |
| `folder.py` | the folder with the credited answers, which a later start continues |
"""
