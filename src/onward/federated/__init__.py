"""Federated learning: clients train on data that stays with them, a server averages what they learned.

A round of a client is: load the server's parameters, make some steps, send the difference (`Client`, or
`Update.between` two checkpoints or portable states). The server checks each update and takes the weighted mean
(`Server`). `flower_client` and `flower_strategy` do the same over Flower, where `flwr` is installed. A
`PrivateClient` hides single examples of its data.
"""

from onward.federated.client import Client
from onward.federated.flower import flower_client, flower_strategy
from onward.federated.privacy import Privacy, PrivacyBudgetError, PrivateClient
from onward.federated.server import RoundReport, Server, UpdateError
from onward.federated.update import Update, parameters_of

__all__ = [
    "Client",
    "Privacy",
    "PrivacyBudgetError",
    "PrivateClient",
    "RoundReport",
    "Server",
    "Update",
    "UpdateError",
    "flower_client",
    "flower_strategy",
    "parameters_of",
]
