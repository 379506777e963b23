"""Data and weights from where they are: `python -m kdist_trainer.fetch` brings what a URL names
into a folder of this machine before a job starts, with progress, checksums and resume.

`source` says what a place to fetch from can do; `bucket` does it for object stores, `web` for
http:// and https://, `hub` for hf://. `fetcher` runs one fetch from start to end: it lists,
compares with what is there, fetches what is missing, and decides how long failed requests are
repeated. Free of torch.

A fetch may be killed at any time. What is in `files` is whole, and of the version that `fetch.json`
names: a file is moved there when it is complete, and what is of another version is removed before
`fetch.json` names the new one. Files are not synced, because a job would wait for the disk: after a
power failure, a file of the right size may lack content on file systems that give a file its size
first. A digest is compared once, when a file comes.
"""
