from typing import NamedTuple
class Claim(NamedTuple):
    kind: str
    id: str
    statement: str
    paper: object
    comparability: str
    metric: str
    lower: dict
    higher: dict
    at: dict
