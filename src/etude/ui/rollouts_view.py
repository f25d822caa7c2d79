"""The tab *Rollouts*: a table of them, one of them turn by turn, groups, exports."""

from etude.ui.routes import Routes

ROUTES: Routes = {}
