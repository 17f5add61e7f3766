"""Folders that keep scores and gradients: a layer around the in-memory path, which imports nothing from here.

`content` hashes what a folder was made for, with `callable_content`, `network_content` and `data_content`, over `code`
and `hashing`; `fingerprint` says what that is. `files` and `folder_lock` write safely, `folder` is the store itself;
`jobs`, `score_blocks`, `scores` and `gradients` keep finished work.
"""
