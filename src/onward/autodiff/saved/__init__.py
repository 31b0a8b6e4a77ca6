"""Values of the forward pass that gradient rules read: how forward nodes come to output them.

A rule asks for them with `op.save` and gets placeholders. After all rules have run, the functions here change the
forward nodes. This is the only place in `autodiff` that does.
"""
