"""Programs: the calls that the stages run, and the routes of the values between them.

A program is computed once for each kind of call of the user's model, and prints.
"""

from lightning_gpipe.core.programs.program import Part, Program, chain
from lightning_gpipe.core.programs.route import Route, RouteName, SkipName, Value, sender
from lightning_gpipe.core.programs.step import Method, Step
