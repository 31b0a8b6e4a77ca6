"""Runs optimizer models of any form: elementwise, by parameter, or custom ones over sequences.

`make_updater` chooses: `vector` for elementwise rules, on the host or a device; `updater` has those for rules that see
whole parameters and for a device whose memory has no address."""
