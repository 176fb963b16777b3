"""Pipelines: stages, schedules and their simulation.

What this package exports needs no torch; `functional` has the functions that cut models and run schedules.
"""

from torch_impl.pipelining.action import Action as Action
from torch_impl.pipelining.csv_schedule import read_csv as read_csv
from torch_impl.pipelining.csv_schedule import write_csv as write_csv
from torch_impl.pipelining.draw import draw as draw
from torch_impl.pipelining.partition import stage_to_rank as stage_to_rank
from torch_impl.pipelining.schedule_order import schedule_order as schedule_order
from torch_impl.pipelining.simulate import Times as Times
from torch_impl.pipelining.simulate import simulate as simulate
from torch_impl.pipelining.timeline import Timeline as Timeline
