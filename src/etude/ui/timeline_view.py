"""The tab *Timeline*: who waits for whom."""

from etude.ui.routes import Routes

ROUTES: Routes = {}
