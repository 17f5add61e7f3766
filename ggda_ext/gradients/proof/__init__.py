"""Proof before trust: does a fast strategy give the right gradients for this model, this loss and these data?

`probe` looks at a few examples before a pass, and `sample` draws them. `captured_layers` watches the pass itself.
`findings` keeps what was found, so that the next call does not need to look again. The truth is plain autograd, one
example at a time (`truth`). A batch must be the sum of its examples (`mixing`). `descent` follows which example each
number comes from.
"""
