Der Sultan ernennt Richter und kann Begnadigungen und Pendelstrafen gewähren .
Antisemitismus in der modernen Ukraine Antisemitismus und besondere Relativität
Morales setzte seine Fehde mit Buddy Rose fort und besiegte ihn durch Disqualifikation .
Der Amerikaner Maury Tripp besuchte das Jamboree aus Saratoga , Kalifornien .
Er boomte eine Reihe von Bouncern bei Viv Richards in Brisbane und behauptete 3 / 77 und 5 / 92 im dritten Test in Melbourne .
Der Sieg der Französin irritierte einige ihrer männlichen Rivalen .
Gut oder schlecht , die Theorien der Pädagogen wie Rousseaus nahe Zeitgenossen Pestalozzi , Mme .
Alfred Stieglitz hat sich am Real Gymnasium Karlsruhe eingeschrieben .
Superman kämpft gegen die Schurken der Phantom Zone in Washington .
Berke blieb jedoch militärisch neutral und trat nach der Niederlage von Ariq Böke Kublais Inthronisierung frei bei .
Inzwischen hatte Poivre schließlich Sämlinge von Muskatnuss und Nelke und 10.000 Muskatensamen erhalten .
Die Barnstormers spielen derzeit in der Indoor Football League .
Schließlich trägt er vier Lappen , zwei innere Glossae und zwei äußere Gleitschirme , die kollektiv als Ligula bekannt sind .
Keiner von James ' s Biographen akzeptierte sie als plausibel .
Der originale Soundtrack knackte die Top 20 der USA
Durch ihr Eigentum im Osten Orlando floss die Econlockhatchee River , die Reisende durch Fording überquert .
Surrey schlug zuerst und erreichte 174 / 2 zur Mittagszeit .
Innerhalb der Hülsen neigen die Flusspferde dazu , sich nach Geschlecht zu trennen .
Als nächstes , bei der Manchester Trophy in Manchester , Großbritannien er Partner Lovro Zovko bis zum Finale .
Am Tag 35 , HouseGuest konkurrierte in der " A Lotta Pinata " Power of Veto Wettbewerb .
