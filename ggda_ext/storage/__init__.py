"""Folders that keep scores and gradients: a layer around the in-memory path, which imports nothing from here.

`content`, `code` and `data_content` hash what a folder was made for, `fingerprint` says what that is; `files` and
`folder_lock` write safely, `folder` is the store itself; `blocks`, `score_blocks`, `scores` and `gradients` keep
finished work.
"""
