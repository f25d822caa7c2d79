"""The tab *Live*: product sessions, signals, releases."""

from etude.ui.routes import Routes

ROUTES: Routes = {}
