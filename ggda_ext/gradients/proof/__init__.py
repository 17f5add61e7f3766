"""Proof before trust: is a fast way to gradients right for this model, this loss and these data?

`probe` looks at a few examples before a pass (`sample` draws them), `captured_layers` watches the pass itself, and
`findings` keeps what was found for the next call, which then does without the look. The truth is plain autograd, one
example at a time (`truth`). A batch has to be the sum of its examples (`mixing`); `descent` follows which example a
number comes from.
"""
