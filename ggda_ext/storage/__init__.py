"""Folders that keep scores and gradients: a layer around the in-memory path, which imports nothing from this package.

`fingerprint` lists everything that stored numbers depend on. `content` hashes these values, with the help of
`callable_content`, `network_content` and `data_content`, which build on `code` and `hashing`. `files` and `folder_lock`
write safely. `folder` is the store itself. `jobs`, `score_blocks`, `scores` and `gradients` keep finished work.
"""
