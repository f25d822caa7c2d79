"""The tab *Weights*: versions, who serves them, the fleet."""

from etude.ui.routes import Routes

ROUTES: Routes = {}
